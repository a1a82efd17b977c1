"""The experts function: replaces the forward of every fused experts module.

Transformers finds the function by the name "tandem" in its experts interface. The function passes a
module's tokens, with the model's own activation and norm, to the executor of the module's layer.
"""

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

import torch
from torch import Tensor, nn

from tandem.core.errors import ConfigError
from tandem.experts.execution.batch import ExpertFunctions
from tandem.experts.execution.executor import Executor
from tandem.foreign_types import ModelPart
from tandem.hf.compat import gating
from tandem.kernels.activations import find_native_activation, interleave
from tandem.kernels.opaque_calls import opaque

EXPERTS_IMPLEMENTATION = "tandem"
BINDING_NAME = "tandem_experts"
Bound = Sequence[tuple[nn.Module, int]]  # experts modules and their layers in the store


@dataclass(frozen=True, slots=True)
class ExpertsBinding:
    """Connects an experts module to its layer in the host store and to its executor."""

    executor: Executor
    layer: int
    functions: ExpertFunctions


def is_experts_module(module: nn.Module) -> bool:
    """Tell whether a module's forward goes through Transformers' experts interface."""
    return (
        hasattr(module, "has_gate")
        and hasattr(module, "is_transposed")
        and hasattr(module, "down_proj")
    )


def num_spare_experts(module: ModelPart) -> int:
    """Return how many entries of a module's tensors are for experts without weights; mostly 0."""
    return int(getattr(module, "num_spare_experts", 0))


def bind(module: nn.Module, executor: Executor, layer: int) -> None:
    """Make a module compute its experts through an executor from now on."""
    module.tandem_experts = ExpertsBinding(executor, layer, expert_functions(module))  # type: ignore[assignment]


def bind_all(bound: Bound, executor: Executor) -> None:
    """Make all experts modules compute through an executor from now on."""
    for module, layer in bound:
        bind(module, executor, layer)


def expert_functions(experts: nn.Module) -> ExpertFunctions:
    """Return an experts module's gating or activation, and the norm that follows its experts."""
    module = cast("ModelPart", experts)
    has_post_norm = getattr(module, "has_post_expert_norm", False)  # Transformers 5.17 lacks it
    activate = _unbound(gating(module)) if module.has_gate else module.act_fn
    is_interleaved = module.has_gate and not module.is_concatenated
    native = find_native_activation(
        activate, is_gated=module.has_gate, is_interleaved=is_interleaved, parameters=module
    )
    return ExpertFunctions(
        activate=activate,
        post_norm=_NormInAnyMemory(module.post_expert_norm) if has_post_norm else None,
        native=native,
        unpacked_activate=(lambda rows: activate(interleave(rows))) if is_interleaved else activate,
    )


class _NormInAnyMemory:
    """Applies the norm that follows the experts, in whichever memory holds their results.

    The norm's weight is on the GPU with the other dense parts, but results of experts that the CPU
    computes may be on the host.
    """

    def __init__(self, norm: nn.Module) -> None:
        """Wrap the model's norm module."""
        self._norm = norm
        self._weights: dict[torch.device, dict[str, Tensor]] = {}  # they are small

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the norm of `rows` (n, hidden_size), in the memory that holds `rows`."""
        own, device = dict(self._norm.named_parameters()), rows.device
        if all(weight.device == device for weight in own.values()):
            found: Tensor = self._norm(rows)
            return found
        if device not in self._weights:
            self._weights[device] = {name: weight.to(device) for name, weight in own.items()}
        found = torch.func.functional_call(self._norm, self._weights[device], (rows,))
        return found


def _unbound(method: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a module's method without a strong reference to the module.

    A module holds its executor. The executor's device thread holds the functions of all layers that
    it has computed. If these functions held their module, the executor would never be freed.
    """
    if not inspect.ismethod(method):
        return method
    weak: weakref.WeakMethod[Callable[[Tensor], Tensor]] = weakref.WeakMethod(method)

    def call(rows: Tensor) -> Tensor:
        bound = weak()
        assert bound is not None, "the experts module of this activation is gone"
        return bound(rows)

    return call


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the weighted sum of each token's experts: (n_tokens, hidden_size) in and out."""
    binding: ExpertsBinding | None = vars(self).get(BINDING_NAME)
    if binding is None:
        raise ConfigError(
            "experts_implementation='tandem' was set on a model that Tandem did not load; load it "
            "with tandem.load(...) or from_pretrained(..., quantization_config=OffloadConfig())"
        )
    out = opaque(
        "experts",
        binding.executor.execute,
        binding.layer,
        hidden_states,
        top_k_index,
        top_k_weights,
        binding.functions,
    )
    if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
        return _ForwardOnly.apply(out, hidden_states, top_k_weights)  # type: ignore[no-any-return, no-untyped-call]
    return out


class _ForwardOnly(torch.autograd.Function):
    """Refuses a backward pass through the experts, which would otherwise silently be skipped."""

    @staticmethod
    def forward(ctx: object, out: Tensor, *inputs: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> NoReturn:
        raise ConfigError(
            "a backward pass came to experts that Tandem computes, which have no gradients; train "
            "the model as Transformers loads it, without an OffloadConfig"
        )

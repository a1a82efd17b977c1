"""Norms of prompts in one pass: torch makes seven over a prompt's activations.

Norms are known by what they compute, not by their class: a module with one vector of weights that
does to random rows what the kernel does. Decode steps keep the model's own, which are recorded.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tandem.kernels.dense import VALUE_DTYPES, CpuThreads
from tandem.kernels.rows import row_stride

_PROBED_ROWS = 4
# Of the values: the last digit of a few may differ, as sums are added up in another order.
_EQUAL_SHARE = 0.98


class _Kind(NamedTuple):
    """How a class of norms computes."""

    eps: float
    offset: float
    """What is added to the weights: 1 where they are stored as their distance from it."""
    rounds_first: bool
    """Whether rows are rounded before they are multiplied with the weights."""


class NormSwitch:
    """Forwards for the norms of a model's copy: native while `is_on`, for one thread at a time."""

    def __init__(self, model: nn.Module, threads: CpuThreads | None) -> None:
        """Find the norms of a model on the CPU; without threads, none."""
        kinds: dict[tuple[Any, ...], _Kind | None] = {}
        self.forwards: dict[nn.Module, Callable[..., Tensor]] = {}
        """What computes a norm of the model instead of its class."""
        self.is_on = False
        """Whether they are native now; else they are the class's."""
        if threads is None:
            return
        for module in model.modules():
            weight = _only_weight(module)
            eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
            if weight is None or not isinstance(eps, float):
                continue
            key = (type(module), eps, weight.dtype)
            if key not in kinds:
                kinds[key] = _find_kind(module, weight, eps, threads)
            kind = kinds[key]
            if kind is not None:
                self.forwards[module] = self._forward(module, kind, threads)

    def _forward(
        self, module: nn.Module, kind: _Kind, threads: CpuThreads
    ) -> Callable[..., Tensor]:
        def forward(x: Tensor, *others: Tensor | None) -> Tensor:
            weight: Any = module.weight
            stride = row_stride(x) if self.is_on and x.dtype == weight.dtype else None
            if stride is None or any(other is not None for other in others):
                result: Tensor = type(module).forward(module, x, *others)
                return result
            return _norm(x, stride, weight, kind, threads)

        return forward


def _only_weight(module: nn.Module) -> Tensor | None:
    """Return the vector that is all a module has; None for others, and for hooked ones."""
    is_bare = not [*module.children(), *module.buffers(recurse=False)]
    parameters = dict(module.named_parameters(recurse=False))
    if not is_bare or list(parameters) != ["weight"] or "forward" in vars(module):
        return None
    weight = parameters["weight"]
    is_fit = weight.dim() == 1 and weight.device.type == "cpu" and weight.dtype in VALUE_DTYPES
    return weight if is_fit else None


def _find_kind(module: nn.Module, weight: Tensor, eps: float, threads: CpuThreads) -> _Kind | None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(_PROBED_ROWS, len(weight), generator=random, device="cpu").to(weight.dtype)
    try:
        expected = type(module).forward(module, x)  # without hooks, which are of real rows
    except (TypeError, AttributeError):  # it takes a gate too, say
        return None
    if not isinstance(expected, Tensor) or (expected.shape, expected.dtype) != (x.shape, x.dtype):
        return None
    for offset in (0.0, 1.0):
        for rounds_first in (True, False):
            kind = _Kind(eps, offset, rounds_first)
            actual = _norm(x, len(weight), weight, kind, threads)
            if torch.isclose(actual, expected, rtol=1e-6).float().mean() >= _EQUAL_SHARE:
                return kind
    return None


def _norm(x: Tensor, stride: int, weight: Tensor, kind: _Kind, threads: CpuThreads) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    wide = weight.float() + kind.offset
    program = threads.program()
    program.add_norm(
        x.numel() // len(weight), len(weight), kind.eps, kind.rounds_first,
        x.dtype == torch.bfloat16, x.data_ptr(), stride, wide.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    program.run()
    return out

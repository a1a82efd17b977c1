"""Norms of prompts in one pass: torch makes seven over a prompt's activations.

Norms are known by what they compute, not by their class: a module with one vector of weights that
does to random rows, or to rows and gates, what the kernel does. Decode steps keep the model's own,
which are recorded.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tandem.kernels.dense import VALUE_DTYPES, CpuThreads, row_stride
from tandem.kernels.torch_private import without_overrides

_PROBED_ROWS = 4
# Of the values: the last digit of a few may differ, as sums are added up in another order.
_EQUAL_SHARE = 0.98
# What a gate does; the numbers are those of GateKind in csrc/rowwise.hpp.
_NO_GATE = 0
_GATES = (1, 2, 3)


class _Kind(NamedTuple):
    """How a class of norms computes."""

    eps: float
    offset: float
    """What is added to the weights: 1 where they are stored as their distance from it."""
    rounds_first: bool
    """Whether rows are rounded before they are multiplied with the weights."""
    num_groups: int
    """Parts of a row that are divided by roots of their own."""
    gate: int


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
            found: list[_Kind | None] = []
            for has_gate in (False, True):
                key = (type(module), eps, weight.dtype, len(weight), has_gate)
                if key not in kinds:
                    kinds[key] = _find_kind(module, weight, eps, threads, has_gate=has_gate)
                found.append(kinds[key])
            if any(found):
                self.forwards[module] = self._forward(module, found, threads)

    def _forward(
        self, module: nn.Module, kinds: list[_Kind | None], threads: CpuThreads
    ) -> Callable[..., Tensor]:
        def forward(x: Tensor, gate: Tensor | None = None) -> Tensor:
            weight: Any = module.weight
            kind = kinds[gate is not None]
            if self.is_on and kind is not None and x.dtype == weight.dtype:
                result = _norm(x, gate, weight, kind, threads)
                if result is not None:
                    return result
            own: Tensor = type(module).forward(module, *((x,) if gate is None else (x, gate)))
            return own

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


def _find_kind(
    module: nn.Module, weight: Tensor, eps: float, threads: CpuThreads, *, has_gate: bool
) -> _Kind | None:
    random = torch.Generator().manual_seed(0)
    shape = (_PROBED_ROWS, len(weight))
    x, gate = (
        torch.randn(shape, generator=random, device="cpu").to(weight.dtype) for _ in range(2)
    )
    try:  # without hooks, which are of real rows
        expected = type(module).forward(module, *((x, gate) if has_gate else (x,)))
    except (TypeError, AttributeError):  # it takes other arguments
        return None
    if not isinstance(expected, Tensor) or (expected.shape, expected.dtype) != (x.shape, x.dtype):
        return None
    num_groups = len(weight) // (getattr(module, "group_size", None) or len(weight))
    for offset, rounds_first, kind_of_gate in itertools.product(
        (0.0, 1.0), (True, False), _GATES if has_gate else (_NO_GATE,)
    ):
        kind = _Kind(eps, offset, rounds_first, num_groups, kind_of_gate)
        actual = _norm(x, gate if has_gate else None, weight, kind, threads)
        if actual is not None:
            is_equal = torch.isclose(actual, expected, rtol=1e-6).float().mean() >= _EQUAL_SHARE
            if is_equal:
                return kind
    return None


def _norm(
    x: Tensor, gate: Tensor | None, weight: Tensor, kind: _Kind, threads: CpuThreads
) -> Tensor | None:
    """Norm the rows of x, natively; None where they, or those of the gate, lie unevenly apart."""
    cols = len(weight) // kind.num_groups
    rows, gates = (
        None if part is None else part.unflatten(-1, (kind.num_groups, cols)) for part in (x, gate)
    )
    are_even = all(part is None or row_stride(part) is not None for part in (rows, gates))
    is_alike = gate is None or (gate.shape, gate.dtype) == (x.shape, x.dtype)
    if rows is None or not are_even or not is_alike:
        return None
    out = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    wide = weight.float() + kind.offset
    program = threads.program()
    with without_overrides():
        program.add_norm(kind.eps, kind.rounds_first, rows, wide, kind.gate, gates, out)
    program.run()
    return out

"""Norms of prompts in one pass; torch makes seven passes over a prompt's activations.

Norms are recognised by their results, not by their class. A norm is a module that has one vector of
weights or none, and that gives the kernel's results for random rows, with or without gates. Decode
steps keep the model's own norms, which are recorded.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tandem.decode.substitutions.prompt_operations import PromptOperations, active_operations
from tandem.decode.substitutions.substitution import Substitution
from tandem.foreign_types import ModelPart
from tandem.kernels import _native
from tandem.kernels.dense import VALUE_DTYPES, row_stride
from tandem.kernels.torch_private import without_overrides

_PROBED_ROWS = 4
# Share of equal values. A few may differ in the last digit because sums add in another order.
_EQUAL_SHARE = 0.98
# Kinds of gates and of rounding, with the numbers of csrc/rowwise.hpp.
_NO_GATE = 0
_GATES = (1, 2, 3)
_ROUNDINGS = (1, 0, 2)  # the most common one first


class _Kind(NamedTuple):
    """How a class of norms computes, in the terms of the native kernel."""

    eps: float
    offset: float
    """Added to the weights: 1 if a checkpoint stores weight - 1."""
    rounding: int
    num_groups: int
    """Groups of a row, each normalised by its own root mean square."""
    gate: int


def _may_be_norm(module: nn.Module) -> bool:
    """Tell whether a module has an epsilon, at most one vector of weights, and nothing else.

    False also for a module whose `forward` was replaced.
    """
    parameters = dict(module.named_parameters(recurse=False))
    is_bare = not [*module.children(), *module.buffers(recurse=False)]
    if not is_bare or parameters.keys() - {"weight"} or "forward" in vars(module):
        return False
    are_fit = all(
        weight.dim() == 1 and weight.device.type == "cpu" and weight.dtype in VALUE_DTYPES
        for weight in parameters.values()
    )
    return are_fit and isinstance(_eps(module), float)


def _eps(module: nn.Module) -> float | None:
    eps: float | None = vars(module).get("variance_epsilon", vars(module).get("eps"))
    return eps


def _native_norm(self: ModelPart, x: Tensor, gate: Tensor | None = None) -> Tensor | None:
    """Return a prompt's norm from the native kernel; None if the model's own code must run.

    The result is None outside prompts, and for inputs or norms that the kernel does not support.
    """
    ops, weight, has_gate = active_operations(), _weight(self), gate is not None
    if ops is None or x.dtype not in VALUE_DTYPES or x.device.type != "cpu":
        return None
    if weight is not None and len(weight) != x.shape[-1]:
        return None
    own_dtype = None if weight is None else weight.dtype
    key = (type(self), _eps(self), own_dtype, x.dtype, x.shape[-1], has_gate)
    if key not in ops.norm_kinds:
        with without_overrides():
            ops.norm_kinds[key] = _find_kind(self, ops, x, has_gate=has_gate)
    kind = ops.norm_kinds[key]
    if not isinstance(kind, _Kind):
        return None
    if not has_gate and x.dim() == 4 and row_stride(x) is None:  # heads come before tokens
        turned = _norm(ops, x.transpose(1, 2), None, weight, kind)
        return None if turned is None else turned.transpose(1, 2)
    return _norm(ops, x, gate, weight, kind)


def _weight(module: ModelPart) -> Tensor | None:
    weight: Tensor | None = dict(module.named_parameters(recurse=False)).get("weight")
    return weight


def _find_kind(
    module: ModelPart, ops: PromptOperations, like: Tensor, *, has_gate: bool
) -> _Kind | None:
    weight, eps, size = _weight(module), _eps(module), like.shape[-1]
    random = torch.Generator().manual_seed(0)
    shape = (_PROBED_ROWS, size)
    x, gate = (torch.randn(shape, generator=random, device="cpu").to(like.dtype) for _ in range(2))
    try:  # without hooks, which expect real rows
        expected = type(module).forward(module, *((x, gate) if has_gate else (x,)))
    except (TypeError, AttributeError, RuntimeError):  # the module takes other arguments
        return None
    if eps is None or not isinstance(expected, Tensor):
        return None
    if (expected.shape, expected.dtype) != (x.shape, x.dtype):
        return None
    num_groups = size // (vars(module).get("group_size") or size)
    for offset, rounding, kind_of_gate in itertools.product(
        (0.0, 1.0), _ROUNDINGS, _GATES if has_gate else (_NO_GATE,)
    ):
        kind = _Kind(eps, offset, rounding, num_groups, kind_of_gate)
        actual = _norm(ops, x, gate if has_gate else None, weight, kind)
        if actual is not None:
            is_equal = torch.isclose(actual, expected, rtol=1e-6).float().mean() >= _EQUAL_SHARE
            if is_equal:
                return kind
    return None


def _norm(
    ops: PromptOperations, x: Tensor, gate: Tensor | None, weight: Tensor | None, kind: _Kind
) -> Tensor | None:
    """Return the norm of the rows of `x`, computed natively.

    None if strides are irregular, or the gate's shape or dtype is not that of `x`.
    """
    cols = x.shape[-1] // kind.num_groups
    rows, gates = (
        None if part is None else part.unflatten(-1, (kind.num_groups, cols)) for part in (x, gate)
    )
    are_even = all(part is None or row_stride(part) is not None for part in (rows, gates))
    is_alike = gate is None or (gate.shape, gate.dtype) == (x.shape, x.dtype)
    if rows is None or not are_even or not is_alike:
        return None
    out = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    wide = None if weight is None else weight.float() + kind.offset

    def add(program: _native.Program) -> None:
        program.add_norm(kind.eps, kind.rounding, rows, wide, kind.gate, gates, out)

    ops.run(add)
    return out


NORM = Substitution(_may_be_norm, _native_norm)

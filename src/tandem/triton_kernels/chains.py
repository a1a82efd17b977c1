"""Chains of elementwise operations, each as one launch: activations, gates, decays.

A chain is a list of steps over a few tensors; a kernel is compiled for each different chain. Each
step's result is rounded to the step's dtype, as torch rounds it.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

# Numbers of the kinds of steps, by torch's names; `_apply` uses the same.
KINDS = {
    name: number
    for number, name in enumerate(
        ("copy", "silu", "sigmoid", "softplus", "relu", "exp", "tanh", "neg", "add", "mul", "sub",
         "div")
    )
}  # fmt: skip
MOST_SOURCES, MOST_STEPS = 4, 12
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BLOCK = 1024
_LINEAR_FROM = constexpr(20.0)  # above it softplus is linear, as in torch


class Chain(NamedTuple):
    """A list of steps; each computes a value from sources, numbers and values of earlier steps.

    Operands are indices into the list of the sources, the numbers and the steps' values.
    """

    kinds: tuple[int, ...]
    first: tuple[int, ...]
    """The index of each step's first operand."""
    second: tuple[int, ...]
    """The index of each step's second operand; for steps with one operand, that of the first."""
    dtypes: tuple[int, ...]
    """The dtype to which each step's result is rounded: 0 fp32, 1 bf16, 2 fp16."""
    numbers: tuple[float, ...]


def dtype_code(dtype: torch.dtype) -> int | None:
    """Return the number of a dtype in `Chain.dtypes`; None: the dtype is not supported."""
    return _DTYPES.get(dtype)


@triton.jit
def _of_one(kind: constexpr, a: tensor) -> tensor:
    """Compute a step that has one operand, without rounding."""
    if kind == 1:
        a = a / (1.0 + tl.exp(-a))
    elif kind == 2:
        a = 1.0 / (1.0 + tl.exp(-a))
    elif kind == 3:
        a = tl.where(a > _LINEAR_FROM, a, tl.log(1.0 + tl.exp(tl.minimum(a, _LINEAR_FROM))))
    elif kind == 4:
        a = tl.where(a < 0.0, 0.0, a)  # keeps NaN
    elif kind == 5:
        a = tl.exp(a)
    elif kind == 6:
        a = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * a))
    elif kind == 7:
        a = -a
    return a


@triton.jit
def _apply(kind: constexpr, dtype: constexpr, a: tensor, b: tensor) -> tensor:
    """Compute one step on fp32 values, and round it to its dtype."""
    if kind == 8:
        a = a + b
    elif kind == 9:
        a = a * b
    elif kind == 10:
        a = a - b
    elif kind == 11:
        a = a / b
    else:
        a = _of_one(kind, a)
    if dtype == 1:
        a = a.to(tl.bfloat16).to(tl.float32)
    elif dtype == 2:
        a = a.to(tl.float16).to(tl.float32)
    return a


@triton.jit
def _source(x: tensor, row: tensor, col: tensor, mask: tensor, strides: constexpr) -> tensor:
    return tl.load(x + row * strides[0] + col * strides[1], mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=("num_values",))
def run_chain(
    a: tensor,
    b: tensor,
    c: tensor,
    d: tensor,
    out: tensor,
    num_values: tensor,
    num_cols: constexpr,
    num_sources: constexpr,
    strides_a: constexpr,
    strides_b: constexpr,
    strides_c: constexpr,
    strides_d: constexpr,
    kinds: constexpr,
    first: constexpr,
    second: constexpr,
    dtypes: constexpr,
    numbers: constexpr,
    block: constexpr,
) -> None:
    """Write the last step's values to out (rows, cols). A program computes a block of them.

    `strides_a` to `strides_d` are each source's row and column strides.
    """
    at = tl.program_id(0) * block + tl.arange(0, block)
    mask, row, col = at < num_values, (at // num_cols).to(tl.int64), at % num_cols
    values = (_source(a, row, col, mask, strides_a),)
    if num_sources > 1:
        values = values + (_source(b, row, col, mask, strides_b),)
    if num_sources > 2:
        values = values + (_source(c, row, col, mask, strides_c),)
    if num_sources > 3:
        values = values + (_source(d, row, col, mask, strides_d),)
    for i in tl.static_range(len(numbers)):
        values = values + (tl.full((block,), numbers[i], dtype=tl.float32),)
    for i in tl.static_range(len(kinds)):
        values = values + (_apply(kinds[i], dtypes[i], values[first[i]], values[second[i]]),)
    found = values[num_sources + len(numbers) + len(kinds) - 1]
    tl.store(out + at, found.to(out.dtype.element_ty), mask=mask)


def strides_in(x: Tensor, shape: Sequence[int]) -> tuple[int, int] | None:
    """Return the row and column strides of a tensor when broadcast to a shape.

    None if the rows are not evenly spaced.
    """
    lines = x.expand(shape)
    dims = [(n, s) for n, s in zip(shape[:-1], lines.stride()[:-1], strict=True) if n > 1]
    for (_, outer), (count, inner) in itertools.pairwise(dims):
        if outer != count * inner:
            return None
    return (dims[-1][1] if dims else 0), (lines.stride(-1) if shape[-1] > 1 else 0)


def chain(
    sources: Sequence[Tensor], steps: Chain, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return the last step's values in `shape`.

    `strides_in` must not be None for any source.
    """
    result: Tensor = _chain(list(sources), *map(list, steps), list(shape), dtype)
    return result


@torch.library.custom_op("tandem::chain", mutates_args=())
def _chain(
    sources: list[Tensor],
    kinds: list[int],
    first: list[int],
    second: list[int],
    dtypes: list[int],
    numbers: list[float],
    shape: list[int],
    dtype: torch.dtype,
) -> Tensor:
    """Compute `chain` as one torch operation."""
    out = torch.empty(shape, dtype=dtype, device=sources[0].device)
    # Contiguous values count as one column, so that one kernel serves all shapes.
    is_dense = all(x.expand(shape).is_contiguous() for x in sources)
    strides = [(1, 0) if is_dense else strides_in(x, shape) for x in sources]
    rest = MOST_SOURCES - len(sources)
    names = [f"strides_{name}" for name in "abcd"]
    run_chain[(-(-out.numel() // _BLOCK),)](
        *sources, *sources[:1] * rest, out, out.numel(), num_cols=1 if is_dense else shape[-1],
        num_sources=len(sources), **dict(zip(names, [*strides, *[(0, 0)] * rest], strict=True)),
        kinds=tuple(kinds), first=tuple(first), second=tuple(second), dtypes=tuple(dtypes),
        numbers=tuple(numbers), block=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out

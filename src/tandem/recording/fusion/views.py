"""Brings tensors with any strides to the form that small native operations read and write.

These operations are in csrc/tensor_ops.hpp.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels import _native
from tandem.recording.recorder import NotRecordableError, Ref

ELEMENT_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool)
# Dtypes of results. Integers are missing because values pass through fp32.
WRITTEN_DTYPES = (torch.float32, torch.bfloat16, torch.bool)
FLOAT_DTYPES = (torch.float32, torch.bfloat16)
MAX_DIMENSIONS = 4


def dense(x: Tensor) -> Tensor:
    """Return `x`, an output tensor, as it is; `NotRecordableError` if it is not contiguous."""
    if not x.is_contiguous():
        raise NotRecordableError("a native operation would write a tensor that has gaps")
    return x


def in_four_dimensions(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of views of `tensors`, in the same order, with at most four dimensions.

    All tensors must have one shape. Adjacent dimensions are merged if the strides of all tensors
    allow that. If more than four dimensions remain, each list has one part of every tensor.
    """
    shape = tensors[0].shape
    strides = [x.stride() for x in tensors]
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in tensors]
    for dim in range(len(shape) - 1, -1, -1):
        if shape[dim] == 1:
            continue
        own = [stride[dim] for stride in strides]
        if sizes and all(o == k[0] * sizes[0] for o, k in zip(own, kept, strict=True)):
            sizes[0] *= shape[dim]
            continue
        sizes.insert(0, shape[dim])
        for k, o in zip(kept, own, strict=True):
            k.insert(0, o)
    merged = [
        x.as_strided(sizes or [1], k or [1], x.storage_offset())
        for x, k in zip(tensors, kept, strict=True)
    ]
    yield from _cut(merged)


def _cut(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    if tensors[0].dim() <= MAX_DIMENSIONS:
        yield tensors
        return
    for index in range(len(tensors[0])):
        yield from _cut([x[index] for x in tensors])


def add_combination(
    program: _native.Program, kind: int, operands: Sequence[Tensor | float], out: Tensor
) -> None:
    """Add `out` = kind(operands) to a program; an operand is a number or broadcasts to `out`."""
    tensors = [x.expand(out.shape) for x in operands if isinstance(x, Tensor)]
    for parts in in_four_dimensions([out, *tensors]):
        rest = iter(parts[1:])
        read = [next(rest) if isinstance(x, Tensor) else x for x in operands]
        program.add_elementwise(kind, parts[0], *read)


class Small(NamedTuple):
    """A small native operation: the tensors it reads, and a function that adds it to a program."""

    refs: Sequence[Ref]
    add: Callable[[_native.Program, list[Tensor], list[Tensor]], None]

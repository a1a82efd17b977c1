"""Tensors as the small native operations take them (csrc/tensor_ops.hpp): any strides."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels import _native
from tandem.recording.recorder import NotRecordableError, Ref

# The numbers of ElementType in C++.
ELEMENT_TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.int64: 2,
    torch.int32: 3,
    torch.bool: 4,
}
# What may be written: whole numbers would be rounded to fp32.
WRITTEN_DTYPES = (torch.float32, torch.bfloat16, torch.bool)
FLOAT_DTYPES = (torch.float32, torch.bfloat16)
MAX_DIMENSIONS = 4

Four = tuple[int, int, int, int]
# Type, address and strides of a tensor, and the number that stands for it where the address is 0.
View = tuple[int, int, Four, float]
NO_VIEW: View = (0, 0, (0, 0, 0, 0), 0.0)


def view_of(x: Tensor) -> View:
    """Return a tensor of up to four dimensions as C++ takes it."""
    return ELEMENT_TYPES[x.dtype], x.data_ptr(), in_four(x.stride(), 0), 0.0


def number_view(value: float) -> View:
    """Return a number that stands for a tensor of any shape."""
    return 0, 0, (0, 0, 0, 0), value


def dense_of(x: Tensor) -> tuple[int, int]:
    """Return a tensor without gaps as C++ takes it."""
    if not x.is_contiguous():
        raise NotRecordableError("a native operation would write a tensor that has gaps")
    return ELEMENT_TYPES[x.dtype], x.data_ptr()


def in_four(values: Sequence[int], filling: int) -> Four:
    """Return sizes or strides as those of a tensor that has four dimensions."""
    first, second, third, last = [*[filling] * (MAX_DIMENSIONS - len(values)), *values]
    return first, second, third, last


def in_four_dimensions(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one shape as few tensors of at most four dimensions, in the same order.

    Dimensions that lie evenly one inside the other in all of them become one.
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
    """Add `out` = kind(operands), which are tensors that broadcast to it, or numbers."""
    tensors = [x.expand(out.shape) for x in operands if isinstance(x, Tensor)]
    for parts in in_four_dimensions([out, *tensors]):
        rest = iter(parts[1:])
        views = [view_of(next(rest)) if isinstance(x, Tensor) else number_view(x) for x in operands]
        views += [NO_VIEW] * (3 - len(views))
        program.add_elementwise(
            kind, in_four(parts[0].shape, 1), views[0], views[1], views[2], view_of(parts[0])
        )


class Small(NamedTuple):
    """A small native operation: the tensors that it reads, and what it adds to a program."""

    refs: Sequence[Ref]
    add: Callable[[_native.Program, list[Tensor], list[Tensor]], None]

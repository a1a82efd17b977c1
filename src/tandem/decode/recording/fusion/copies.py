"""Tensors put side by side, and values taken to another type: copies in fixed memory."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tandem.decode.recording.fusion.graph import Found, Graph
from tandem.decode.recording.program import NativeCall
from tandem.decode.recording.recorder import NotRecordableError, Operation, Ref
from tandem.kernels import _native
from tandem.kernels.dense import VALUE_DTYPES, CpuThreads

MAX_DIMENSIONS = 4

# The operations of a join, what is joined, the result, and in which dimension.
_Join = tuple[list[Operation], list[Ref], Ref, int]


def find_joins(graph: Graph, threads: CpuThreads) -> Iterator[Found]:
    """Find tensors that are joined, by `cat` or slice by slice in new memory."""
    for operation in graph.operations:
        if operation.name == "cat":
            dim = operation.args[1] if len(operation.args) > 1 else 0
            found = _join(graph, [operation], list(operation.args[0]), dim, operation.outputs[0])
        elif operation.name in ("new_empty", "empty", "empty_like"):
            found = _match_filled(graph, operation)
        else:
            continue
        if found is not None:
            group, sources, result, dim = found
            call = copy_call(threads, dim)
            yield Found(group, Operation(call, tuple(sources), {}, [result], "join", sources))


def _match_filled(graph: Graph, made: Operation) -> _Join | None:
    """Match new memory that is filled slice by slice of its last dimension, in order."""
    result = made.outputs[0]
    if result is None:
        return None
    last, filled = graph.tensor(result).dim() - 1, 0
    group, sources = [made], []
    for part in graph.users.get(result, []):
        if filled == graph.tensor(result).shape[-1]:
            break
        copied = graph.only_user(part.outputs[0], "copy_") if part.name == "slice" else None
        if copied is None or part.args[1] not in (-1, last) or part.args[2] != filled:
            return None
        if part.args[4:] not in ((), (1,)):  # every other value
            return None
        if graph.tensor(copied.args[0]).shape != graph.tensor(copied.args[1]).shape:
            return None
        filled += graph.tensor(copied.args[0]).shape[-1]
        sources.append(copied.args[1])
        group += [part, copied]
    return _join(graph, group, sources, last, result)


def _join(
    graph: Graph, group: list[Operation], sources: list[Ref], dim: int, result: Ref | None
) -> _Join | None:
    if result is None or not sources:
        return None
    out = graph.tensor(result)
    tensors = [graph.tensor(ref) for ref in sources]
    is_whole = sum(x.shape[dim] for x in tensors if x.dim() == out.dim()) == out.shape[dim]
    is_alike = all(x.dtype == out.dtype and x.dim() == out.dim() for x in tensors)
    if not (is_whole and is_alike and all(can_copy(x) for x in [*tensors, out])):
        return None
    return group, sources, result, dim


def can_copy(x: Tensor) -> bool:
    """Tell whether a native copy reads or writes such a tensor."""
    return x.dtype in VALUE_DTYPES and 1 <= x.dim() <= MAX_DIMENSIONS and x.stride(-1) == 1


def copy_call(threads: CpuThreads, dim: int) -> NativeCall:
    """Return the call that copies its inputs, one after the other in dimension `dim`."""

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        (out,), begin = outputs, 0
        for x in inputs:
            _add_copy(program, x, out.narrow(dim, begin, x.shape[dim]))
            begin += x.shape[dim]

    return NativeCall(add, threads)


def _add_copy(program: _native.Program, source: Tensor, target: Tensor) -> None:
    if not can_copy(source) or not can_copy(target):
        raise NotRecordableError("a native copy would read a tensor whose last dimension has gaps")
    program.add_copy(
        in_four(source.shape, 1), source.dtype == torch.bfloat16, source.data_ptr(),
        in_four(source.stride(), 0), target.dtype == torch.bfloat16, target.data_ptr(),
        in_four(target.stride(), 0),
    )  # fmt: skip


def in_four(values: tuple[int, ...], filling: int) -> tuple[int, int, int, int]:
    """Return sizes or strides as those of a tensor that has four dimensions."""
    first, second, third, last = (*[filling] * (MAX_DIMENSIONS - len(values)), *values)
    return first, second, third, last

"""Values that are read or written by number: embeddings, gathering, scattering."""

from typing import Any

import torch
from torch import Tensor

from tandem.kernels import _native
from tandem.recording.fusion.elementwise import KINDS, are_floats
from tandem.recording.fusion.graph import Graph
from tandem.recording.fusion.views import (
    MAX_DIMENSIONS,
    Four,
    Small,
    View,
    add_combination,
    dense_of,
    in_four,
    number_view,
    view_of,
)
from tandem.recording.program import require_contiguous
from tandem.recording.recorder import Operation, Ref

# As C++ takes an index: address, strides, and the number and distance of the places.
_Index = tuple[int, Four, int, int]


def match_lookup(graph: Graph, operation: Operation) -> Small | None:
    """Match an operation that takes int64 numbers of places along one dimension."""
    result = operation.outputs[0]
    if result is None or operation.kwargs or not are_floats(graph.tensor(result)):
        return None
    if operation.name in ("embedding", "index"):
        return _match_rows(graph, operation)
    if operation.name == "gather":
        return _match_gather(graph, operation)
    if operation.name in ("scatter", "scatter_"):
        return _match_scatter(graph, operation)
    return None


def _are_known(graph: Graph, values: Any, index: Any) -> bool:
    if not (isinstance(values, Ref) and isinstance(index, Ref)):
        return False
    number = graph.tensor(index)
    is_index = number.dtype == torch.int64 and 1 <= number.dim() <= MAX_DIMENSIONS
    return is_index and are_floats(graph.tensor(values))


def _match_rows(graph: Graph, operation: Operation) -> Small | None:
    table, index = operation.args[:2]
    if operation.name == "index":
        if len(index) != 1:
            return None
        index = index[0]
    if not _are_known(graph, table, index) or graph.tensor(table).dim() > 2:
        return None
    if not graph.tensor(index).is_contiguous():
        return None
    return Small([table, index], add_rows)


def add_rows(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Add rows of a table, by number: [table, index] to [rows]."""
    (table, index), (out,) = inputs, outputs
    require_contiguous(index)
    rows = table if table.dim() == 2 else table[:, None]
    places: _Index = (index.data_ptr(), (0, 0, 1, 0), len(rows), rows.stride(0))
    view: View = (*view_of(rows)[:2], (0, 0, 0, rows.stride(1)), 0.0)
    program.add_lookup((1, 1, index.numel(), rows.shape[1]), view, places, dense_of(out))


def _places(x: Tensor, dim: int, index: Tensor) -> tuple[_Index, Four]:
    """Return where `x` is met, and its strides without the dimension that numbers stand for."""
    strides = list(x.stride())
    stride, strides[dim] = strides[dim], 0
    where = (index.data_ptr(), in_four(index.stride(), 0), x.shape[dim], stride)
    return where, in_four(strides, 0)


def _match_gather(graph: Graph, operation: Operation) -> Small | None:
    source, dim, index = operation.args[:3]
    if not _are_known(graph, source, index):
        return None

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        x, numbers = inputs
        places, strides = _places(x, dim, numbers)
        view: View = (*view_of(x)[:2], strides, 0.0)
        program.add_lookup(in_four(numbers.shape, 1), view, places, dense_of(outputs[0]))

    return Small([source, index], add)


def _match_scatter(graph: Graph, operation: Operation) -> Small | None:
    if len(operation.args) != 4:
        return None
    target, dim, index, value = operation.args
    if not _are_known(graph, target, index):
        return None
    is_tensor = isinstance(value, Ref)
    if is_tensor and not are_floats(graph.tensor(value)):
        return None

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        (before, numbers, *values), (out,) = inputs, outputs
        if not operation.has_effects:
            add_combination(program, KINDS["copy"], [before], out)
        places, strides = _places(out, dim, numbers)
        view: View = (*view_of(out)[:2], strides, 0.0)
        read = view_of(values[0]) if values else number_view(float(value))
        program.add_scatter(in_four(numbers.shape, 1), read, places, view)

    return Small([target, index, *([value] if is_tensor else [])], add)

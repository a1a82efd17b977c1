"""Indexed reads and writes: embeddings, gathers, scatters."""

import torch
from torch import Tensor

from tandem.kernels import _native
from tandem.recording.fusion.elementwise import KINDS, are_floats
from tandem.recording.fusion.graph import Graph
from tandem.recording.fusion.views import MAX_DIMENSIONS, Small, add_combination, dense
from tandem.recording.program import require_contiguous
from tandem.recording.recorder import Operation, Ref


def match_lookup(graph: Graph, operation: Operation) -> Small | None:
    """Return the native form of an indexed read or write; None for other operations.

    These are embedding, index, gather and scatter with int64 indices along one dimension.
    """
    result = operation.outputs[0]
    if result is None or operation.kwargs:
        return None
    if operation.name in ("embedding", "index"):
        return _match_rows(graph, operation)
    if not are_floats(graph.tensor(result)):
        return None
    if operation.name == "gather":
        return _match_gather(graph, operation)
    if operation.name in ("scatter", "scatter_"):
        return _match_scatter(graph, operation)
    return None


def _are_known(graph: Graph, values: object, index: object, *, are_whole: bool = False) -> bool:
    if not (isinstance(values, Ref) and isinstance(index, Ref)):
        return False
    number, table = graph.tensor(index), graph.tensor(values)
    is_index = number.dtype == torch.int64 and 1 <= number.dim() <= MAX_DIMENSIONS
    return is_index and (are_floats(table) or (are_whole and table.dtype == torch.int64))


def _match_rows(graph: Graph, operation: Operation) -> Small | None:
    table, index = operation.args[:2]
    if operation.name == "index":
        if len(index) != 1:
            return None
        index = index[0]
    if not _are_known(graph, table, index, are_whole=True) or graph.tensor(table).dim() > 2:
        return None
    if not graph.tensor(index).is_contiguous():
        return None
    return Small([table, index], add_rows)


def add_rows(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Add a lookup of table rows to a program: inputs [table, index], outputs [rows]."""
    (table, index), (out,) = inputs, outputs
    require_contiguous(index)
    rows = table if table.dim() == 2 else table[:, None]
    numbers = index.view(-1, 1).expand(-1, rows.shape[1])
    program.add_lookup(rows, 0, numbers, dense(out))


def _match_gather(graph: Graph, operation: Operation) -> Small | None:
    source, dim, index = operation.args[:3]
    if not _are_known(graph, source, index):
        return None

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        x, numbers = inputs
        program.add_lookup(x, dim % x.dim(), numbers, dense(outputs[0]))

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
        part = tuple(slice(size) for size in numbers.shape)
        read = values[0][part] if values else float(value)
        program.add_scatter(read, dim % out.dim(), numbers, out)

    return Small([target, index, *([value] if is_tensor else [])], add)

"""Fuses packed linear layers with the same input, such as queries and keys, into one launch."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from tandem.recording.fusion.graph import Found, Graph
from tandem.recording.recorder import Operation, Ref

if TYPE_CHECKING:
    from tandem.triton_kernels.dense import DeviceWeight

_NAME = "packed_linear"  # of `tandem.triton_kernels.dense`


def find_projections(graph: Graph) -> Iterator[Found]:
    """Find groups of linear layers with the same input; the fused one runs where the first does."""
    by_input: dict[Ref, list[Operation]] = {}
    for operation in graph.operations:
        if operation.name == _NAME and operation.args[1].number in graph.fixed:
            by_input.setdefault(_seen_through(graph, operation.args[0]), []).append(operation)
    for operations in by_input.values():
        yield from _joined(graph, operations)


def _seen_through(graph: Graph, rows: Ref) -> Ref:
    """Return the tensor of which `rows` is a view; if `rows` is no view, `rows` itself.

    Layers with the same input read it through different views.
    """
    view = graph.made_by(rows, "reshape") or graph.made_by(rows, "view")
    if view is None or not graph.shares_memory(view.args[0], rows):
        return rows
    source: Ref = view.args[0]
    return source


def _joined(graph: Graph, operations: list[Operation]) -> Iterator[Found]:
    from tandem.triton_kernels.dense import MOST_TOGETHER, can_join

    group: list[Operation] = []
    for operation in operations:
        num_tokens = len(graph.tensor(operation.args[0]))
        weights = [_weight(graph, each) for each in (*group[:1], operation)]
        if len(group) == MOST_TOGETHER or not can_join(num_tokens, *weights):
            yield from _found(graph, group)
            group = []
        group.append(operation)
    yield from _found(graph, group)


def _found(graph: Graph, group: list[Operation]) -> Iterator[Found]:
    from tandem.triton_kernels.dense import multiply_together

    if len(group) < 2:
        return
    rows = group[0].args[0]
    if graph.is_written_between([rows], group[0], group[-1]):
        return
    call = partial(multiply_together, weights=[_weight(graph, each) for each in group])
    outputs = [each.outputs[0] for each in group]
    fused = Operation(call, (rows,), {}, outputs, _NAME, [rows], returns_sequence=True)
    yield Found(group[::-1], fused)  # the last one named gives the place


def _weight(graph: Graph, operation: Operation) -> "DeviceWeight":
    from tandem.triton_kernels.dense import DeviceWeight

    image, *sizes = operation.args[1:]
    return DeviceWeight(graph.tensor(image), *sizes)

"""What no pattern has taken: each operation by itself, if it is one that programs have.

Else it would cut a program in two.
"""

from collections.abc import Callable, Iterator

from tandem.decode.recording.fusion.copies import match_copy
from tandem.decode.recording.fusion.elementwise import match_cast, match_elementwise
from tandem.decode.recording.fusion.graph import Found, Graph
from tandem.decode.recording.fusion.lookups import match_lookup
from tandem.decode.recording.fusion.products import match_product
from tandem.decode.recording.fusion.reductions import match_reduction
from tandem.decode.recording.fusion.views import Small
from tandem.decode.recording.program import NativeCall
from tandem.decode.recording.recorder import Operation
from tandem.kernels.dense import CpuThreads

_MATCHES: tuple[Callable[[Graph, Operation], Small | None], ...] = (
    match_elementwise,
    match_cast,
    match_copy,
    match_reduction,
    match_lookup,
    match_product,
)


def find_small(graph: Graph, threads: CpuThreads) -> Iterator[Found]:
    """Find the operations that csrc/tensor_ops.hpp has."""
    for operation in graph.operations:
        if isinstance(operation.function, NativeCall) or not operation.outputs:
            continue
        found = (match(graph, operation) for match in _MATCHES)
        small = next((match for match in found if match is not None), None)
        if small is not None:
            fused = Operation(
                NativeCall(small.add, threads), tuple(small.refs), {}, operation.outputs,
                operation.name, list(small.refs), has_effects=operation.has_effects,
                returns_sequence=operation.returns_sequence,
            )  # fmt: skip
            yield Found([operation], fused)

"""Makes single operations native that belong to no group of another pattern.

An operation left in torch splits a program in two.
"""

from collections.abc import Callable, Iterator

from tandem.kernels.dense import CpuThreads
from tandem.recording.fusion.copies import match_copy
from tandem.recording.fusion.elementwise import match_cast, match_elementwise
from tandem.recording.fusion.graph import Found, Graph
from tandem.recording.fusion.lookups import match_lookup
from tandem.recording.fusion.products import match_product
from tandem.recording.fusion.reductions import match_reduction
from tandem.recording.fusion.views import Small
from tandem.recording.program import NativeCall
from tandem.recording.recorder import Operation

_MATCHES: tuple[Callable[[Graph, Operation], Small | None], ...] = (
    match_elementwise,
    match_cast,
    match_copy,
    match_reduction,
    match_lookup,
    match_product,
)


def find_small(graph: Graph, threads: CpuThreads) -> Iterator[Found]:
    """Find operations that have a native counterpart in csrc/tensor_ops.hpp."""
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

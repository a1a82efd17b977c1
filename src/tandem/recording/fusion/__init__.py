"""Replaces well-known groups of recorded operations by one native call each.

Groups are known by what they compute, not by the model that they come from. What does not match in
every detail stays as it is; the recorded graph is compared with the model's own step before it is
trusted.
"""

from collections.abc import Callable, Iterator

from torch import Tensor

from tandem.kernels.dense import VALUE_DTYPES, CpuThreads
from tandem.recording.fusion.calls import find_calls, find_dense_groups
from tandem.recording.fusion.graph import Found, Graph
from tandem.recording.fusion.norms import find_norms
from tandem.recording.fusion.ranked_choices import find_ranked_choices
from tandem.recording.fusion.repeats import without_repeats
from tandem.recording.fusion.rotary import find_pair_rotaries, find_rotaries
from tandem.recording.fusion.routers import (
    find_choices,
    find_choices_first,
    find_small_linears,
)
from tandem.recording.fusion.small import find_small
from tandem.recording.recorder import Operation

_FINDERS: tuple[Callable[[Graph, CpuThreads], Iterator[Found]], ...] = (
    find_norms,
    find_rotaries,
    find_pair_rotaries,
    find_choices,
    find_choices_first,
    find_ranked_choices,
    find_calls,
    find_small_linears,
    find_dense_groups,
    find_small,
)


def fuse(
    operations: list[Operation], tensors: list[Tensor], fixed: set[int], threads: CpuThreads
) -> list[Operation]:
    """Return the operations with groups replaced; `fixed` numbers the tensors that never change.

    `threads` compute what had none of its own.
    """
    for finder in _FINDERS:
        if finder is find_small:  # patterns know operations by who reads them
            operations = without_repeats(operations, tensors)
        graph = Graph(operations, tensors, fixed, VALUE_DTYPES)
        for group, fused in finder(graph, threads):
            graph.replace(group, fused)
        operations = graph.result()
    return operations

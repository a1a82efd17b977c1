"""Replaces well-known groups of recorded operations, each by one native operation.

Groups are found by their operations, whatever the model is. A group that does not match in every
detail stays unchanged; the recorded graph is compared with the model's own step before it is
trusted.
"""

from functools import partial

from torch import Tensor

from tandem.kernels.dense import VALUE_DTYPES, CpuThreads
from tandem.recording.fusion.calls import find_calls, find_dense_groups
from tandem.recording.fusion.graph import Finder, replaced
from tandem.recording.fusion.norms import find_norms, norm_call
from tandem.recording.fusion.ranked_choices import find_ranked_choices
from tandem.recording.fusion.repeats import without_repeats
from tandem.recording.fusion.rotary import find_pair_rotaries, find_rotaries, rotary_call
from tandem.recording.fusion.routers import (
    choice_call,
    find_choices,
    find_choices_first,
    find_small_linears,
)
from tandem.recording.fusion.small import find_small
from tandem.recording.recorder import Operation


def fuse(
    operations: list[Operation], tensors: list[Tensor], fixed: set[int], threads: CpuThreads
) -> list[Operation]:
    """Return the operations with groups fused; `fixed` are the numbers of constant tensors.

    `threads` compute the native operations for which the recorded call has no threads.
    """
    choice = partial(choice_call, threads)
    patterns: tuple[Finder, ...] = (
        partial(find_norms, make=partial(norm_call, threads)),
        partial(find_rotaries, make=partial(rotary_call, threads)),
        partial(find_pair_rotaries, threads=threads),
        partial(find_choices, make=choice),
        partial(find_choices_first, make=choice),
        partial(find_ranked_choices, threads=threads),
        partial(find_calls, threads=threads),
        partial(find_small_linears, threads=threads),
        find_dense_groups,
    )
    operations = replaced(patterns, operations, tensors, fixed, VALUE_DTYPES)
    # Patterns identify operations by their readers.
    operations = without_repeats(operations, tensors)
    small = partial(find_small, threads=threads)
    return replaced((small,), operations, tensors, fixed, VALUE_DTYPES)

"""Decides which experts are read from a disk ahead of use, and which host slots a device borrows.

This is the reference. Host slots make the same decisions natively (`csrc/decider/reads.cpp`), to
the last bit. The eviction policy decides which expert gets a slot and which one leaves, in host
memory as on a GPU (`tandem.policy.admission`).
"""

from collections.abc import Sequence
from typing import NamedTuple

from tandem.policy.residency import READY

MOST_STEP_TOKENS = 32


class ComingUse(NamedTuple):
    """A layer whose next use is known."""

    layer: int
    experts: Sequence[int]
    are_there: bytes  # by expert: 1 if it is in memory, being read, or on a device
    free_slots: int  # free slots of the layer


class SharedSlots(NamedTuple):
    """The transit slots, which experts of all layers pass through."""

    all: int
    free: int
    expected: int  # slots that hold, or are being filled with, what a coming use needs


class ReadAhead(NamedTuple):
    """An expert to read before its layer needs it."""

    layer: int
    expert: int
    passes: bool  # whether it is read into a shared slot, not one of its layer


def known_reads(coming: Sequence[ComingUse], shared: SharedSlots) -> list[ReadAhead]:
    """Return the experts to read now for the layers in `coming`, in their order.

    They go into free slots of their layers, otherwise into at most half of the shared slots; the
    other half is left for urgent reads. The list ends at the first expert without a slot, because a
    later expert would take a slot from a nearer use.
    """
    found, (_, free, expected) = list[ReadAhead](), shared
    for layer, experts, are_there, free_slots in coming:
        for expert in experts:
            if are_there[expert]:
                continue
            passes = free_slots == 0
            if passes and (expected >= shared.all // 2 or free == 0):
                return found
            found.append(ReadAhead(layer, expert, passes))
            free_slots -= not passes
            free -= passes
            expected += passes
    return found


IN_SLOT, PASSING, ON_DISK = range(3)
"""Where an expert is: in a slot of its layer, in a transit slot for one use, or still on the
disk."""


def is_prompt(num_tokens: int) -> bool:
    """Tell whether a step of this many tokens counts as a prompt, which uses most experts."""
    return num_tokens > MOST_STEP_TOKENS


def prompt_reads(on_device: bytes, scores: Sequence[int], most: int) -> list[int]:
    """Return the experts that a prompt's next layer probably uses and no device has, best first.

    They are at most `most`: a prompt uses about as many experts of a layer as of the layer before,
    and an expert that is read in vain delays others. There may be no slots for the last of them.
    """
    absent = [expert for expert, state in enumerate(on_device) if state != READY]
    return sorted(absent, key=lambda expert: -scores[expert])[:most]


def rank_last(on_device: bytes, scores: Sequence[int]) -> list[int]:
    """Return scores for eviction from memory; experts on a device get 0, so they leave first."""
    pairs = zip(on_device, scores, strict=True)
    return [0 if state == READY else score for state, score in pairs]


def may_lend(num_lent: int, num_shared: int) -> bool:
    """Tell whether one more shared slot may be lent to a copy; half the slots are never lent."""
    return 2 * (num_lent + 1) <= num_shared


def may_take_room(num_free: int, *, waits: bool) -> bool:
    """Tell whether a copy may take one of `num_free` free slots.

    The last free slot is kept for callers that wait for one (`waits`), so that they make progress;
    such a caller must hold nothing that others wait for.
    """
    return num_free > (0 if waits else 1)

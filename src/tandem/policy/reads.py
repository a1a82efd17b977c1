"""What is read of a disk ahead of its use, and what of memory is lent to a device: the reference.

Slots in memory decide so natively (`csrc/decider/reads.cpp`), to the last bit. Who gets a slot, and
who leaves for it, is the eviction's and the same in memory as on a GPU (`tandem.policy.admission`).
"""

from collections.abc import Sequence
from typing import NamedTuple

from tandem.policy.residency import READY

MOST_STEP_TOKENS = 32


class ComingUse(NamedTuple):
    """A layer whose next use is known."""

    layer: int
    experts: Sequence[int]
    are_there: bytes  # by expert: 1 in memory, being read, or on a device
    free_slots: int  # of the layer


class SharedSlots(NamedTuple):
    """Slots that experts of all layers pass through."""

    all: int
    free: int
    expected: int  # that have what a coming use wants, or are being read into for it


class ReadAhead(NamedTuple):
    """An expert that is read before its layer asks for it."""

    layer: int
    expert: int
    passes: bool  # through a shared slot; else it gets one of its layer


def known_reads(coming: Sequence[ComingUse], shared: SharedSlots) -> list[ReadAhead]:
    """Return what is read now of known uses, in the order of the layers.

    Into free slots of their layers, else into half of the shared slots: the others are left to what
    is asked for. Nothing overtakes what finds no slot: it would take one from a use that is nearer.
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


def is_prompt(num_tokens: int) -> bool:
    """Tell whether so many tokens of a use are a prompt's, which reads nearly all experts."""
    return num_tokens > MOST_STEP_TOKENS


def prompt_reads(on_device: bytes, scores: Sequence[int]) -> list[int]:
    """Return a prompt's next layer in the order of its reads: all that no device has, best first.

    For the last ones there may be no slot, and a prompt does not use all of them.
    """
    absent = [expert for expert, state in enumerate(on_device) if state != READY]
    return sorted(absent, key=lambda expert: -scores[expert])


def rank_last(on_device: bytes, scores: Sequence[int]) -> list[int]:
    """Return the scores by which memory evicts: what a device has leaves first."""
    pairs = zip(on_device, scores, strict=True)
    return [0 if state == READY else score for state, score in pairs]


def may_lend(num_lent: int, num_shared: int) -> bool:
    """Tell whether one more of the shared slots may be lent to a copy: half are left to uses."""
    return 2 * (num_lent + 1) <= num_shared


def may_take_room(num_free: int, *, waits: bool) -> bool:
    """Tell whether a copy may take one of so many free rooms.

    The last one is for those who wait for it and hold nothing that only goes with it, so that they
    come to an end.
    """
    return num_free > (0 if waits else 1)

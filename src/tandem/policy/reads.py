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


class LikelyExpert(NamedTuple):
    """An absent expert that the next layer's router, run ahead, chose for some token."""

    expert: int
    rank: int
    """Its rank among that token's experts; 0 is the best."""


CERTAIN = 1 << 16
"""The chance, in 65,536ths, of an expert that will be used in any case."""
FIRST_CHANCE = CERTAIN // 2
"""The chance of every rank before anything is known."""
# A read in vain costs the processor a checksum and memory traffic, about half of what a right read
# saves (measured with two cores and a disk of 2.3 GB/s).
_LEAST_CHANCE = CERTAIN * 3 // 8
_FORGET = 5  # a chance is a mean over about 2 ** 5 experts
_LOOK_AGAIN_STEPS = 32


def likely_reads(
    likely: Sequence[LikelyExpert], chances: Sequence[int], num_shared: int
) -> list[int]:
    """Return the likely experts to read now, best rank first.

    `chances` says by rank how often an absent expert was used, in 65,536ths. Reads are limited to a
    quarter of the `num_shared` shared slots, because urgent reads need the others.
    """
    chosen = [one for one in likely if chances[one.rank] >= _LEAST_CHANCE]
    chosen.sort(key=lambda one: one.rank)
    return [one.expert for one in chosen[: num_shared // 4]]


def updated_chance(chance: int, *, was_used: bool) -> int:
    """Return the chance of a rank after one more absent expert of it was used or not."""
    return chance + (((CERTAIN if was_used else 0) - chance) >> _FORGET)


def may_look_ahead(chances: Sequence[int], step: int) -> bool:
    """Tell whether a step runs the next layer's router ahead.

    It does if some chance suffices for a read, and otherwise once in a while, because chances
    change.
    """
    return step % _LOOK_AGAIN_STEPS == 0 or any(chance >= _LEAST_CHANCE for chance in chances)


_BLOCK_STEPS = 8
_BLOCKS = (True, False, False, True)
_KEPT_STEPS = 512


class LookAheadTrial:
    """Tries now and then whether steps are faster with look-ahead, and keeps what is faster.

    A trial has four blocks of steps: with look-ahead, without it twice, and with it. The slower of
    the disk and the processor decides, and reads in vain cost both.
    """

    def __init__(self) -> None:
        """Begin with a trial."""
        self._is_better, self._num_tokens = True, 0
        self._begin()

    def _begin(self) -> None:
        self._step = 0
        self._seconds: tuple[list[float], list[float]] = ([], [])  # without, with look-ahead

    @property
    def looks(self) -> bool:
        """Whether the current step looks ahead."""
        is_trial = self._step < _BLOCK_STEPS * len(_BLOCKS)
        return _BLOCKS[self._step // _BLOCK_STEPS] if is_trial else self._is_better

    def end_step(self, num_tokens: int, seconds: float) -> None:
        """Note how long the current step of this many tokens took.

        A step of another size begins the trial again; the first step of a block does not count.
        """
        if self._step < _BLOCK_STEPS * len(_BLOCKS):
            if num_tokens != self._num_tokens:
                self._num_tokens = num_tokens
                self._begin()
                return
            if self._step % _BLOCK_STEPS > 0:
                self._seconds[self.looks].append(seconds)
        self._step += 1
        if self._step == _BLOCK_STEPS * len(_BLOCKS):
            without, with_it = (sorted(each)[len(each) // 2] for each in self._seconds)
            self._is_better = with_it < without
        if self._step == _BLOCK_STEPS * len(_BLOCKS) + _KEPT_STEPS:
            self._begin()


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

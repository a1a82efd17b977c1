"""Checkpoints of a slot's states: where a prefill leaves them, and which are dropped first.

A state cannot be rolled back, so copies are kept at some lengths, within a budget of bytes. Edits
are likelier near a conversation's end, so checkpoints are dense there and sparse far back.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

# Distances from the end of a prompt part. The next turn does not contain what a chat template adds
# for the answer, and users edit the last message more often than earlier ones.
_BEFORE_END = (8, 128)
# Tokens; copying Qwen3.6's states takes 20 ms, computing 512 tokens of a prompt takes seconds.
_APART = 512
_LEAST_APART = 64


class Checkpoint(NamedTuple):
    """A copy of a slot's states after its first `length` tokens: a tensor for each state."""

    length: int
    states: list[Tensor]
    serial: int = 0
    """A different number for each checkpoint, greater for later ones."""

    @property
    def num_bytes(self) -> int:
        """The size of the states in bytes."""
        return sum(state.nbytes for state in self.states)


def cut_lengths(first: int, end: int, newest: int, every: int = 0) -> list[int]:
    """Return, ascending, the lengths at which a prefill chunk leaves checkpoints.

    The chunk has the tokens from `first` to before `end`; its computation must be split at these
    lengths. `newest` is the length of the slot's last checkpoint, 0 if there is none. The lengths
    include all multiples of `every` in the chunk, unless `every` is 0.
    """
    lengths: list[int] = []
    bound = math.inf
    for length in _checkpoint_lengths(end):
        if length <= first or length - newest < _LEAST_APART:
            break
        if bound - length >= _LEAST_APART:
            lengths.append(length)
            bound = length
    kept = range((first // every + 1) * every, end + 1, every) if every else ()
    return sorted({*lengths, *kept})


def most_checkpoints(num_tokens: int, part_tokens: int, num_prompts: int = 1) -> int:
    """Return how many checkpoints some prompts leave if memory holds them all.

    Each prompt has `num_tokens` tokens. One after another they fill prefill chunks of `part_tokens`
    tokens, so a chunk may end inside a prompt.
    """
    count = 0
    for prompt in range(num_prompts):
        first = newest = 0
        while first < num_tokens:
            room = part_tokens - (prompt * num_tokens + first) % part_tokens
            end = min(first + room, num_tokens)
            lengths = cut_lengths(first, end, newest)
            count, newest = count + len(lengths), lengths[-1] if lengths else newest
            first = end
    return count


def _checkpoint_lengths(end: int) -> Iterator[int]:
    """Yield, descending, the lengths that deserve a checkpoint in a prompt part that ends at `end`.

    Two are near the end; the others are multiples of `_APART`.
    """
    yield from (end - before for before in _BEFORE_END)
    last = (end - _BEFORE_END[-1]) // _APART * _APART
    yield from range(last, 0, -_APART)


class KeptCheckpoints:
    """The checkpoints of each slot, in ascending order of length; slots may share checkpoints."""

    def __init__(self, num_slots: int) -> None:
        """Start without checkpoints, for `num_slots` slots."""
        self._slots: list[list[Checkpoint]] = [[] for _ in range(num_slots)]
        self._serial = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all checkpoints; shared ones count once."""
        kept = {one.serial: one for slot in self._slots for one in slot}
        return sum(one.num_bytes for one in kept.values())

    def newest(self, slot: int) -> int:
        """Return the length of a slot's last checkpoint; 0: it has none."""
        return self._slots[slot][-1].length if self._slots[slot] else 0

    def longest(self, slot: int, length: int) -> Checkpoint | None:
        """Return a slot's longest checkpoint of at most `length` tokens; None: it has none."""
        kept = [one for one in self._slots[slot] if one.length <= length]
        return kept[-1] if kept else None

    def copy(self, source: int, target: int, length: int) -> None:
        """Replace slot `target`'s checkpoints by slot `source`'s of at most `length` tokens.

        `source` and `target` may be the same slot.
        """
        self._slots[target] = [one for one in self._slots[source] if one.length <= length]

    def add(self, slot: int, length: int, states: list[Tensor]) -> None:
        """Add a checkpoint of a slot; `length` must exceed that of the slot's last checkpoint."""
        assert length > self.newest(slot)
        self._serial += 1
        self._slots[slot].append(Checkpoint(length, states, self._serial))

    def thin(self, budget: int) -> None:
        """Drop the least useful checkpoints until the rest takes at most `budget` bytes."""
        while self.num_bytes > budget:
            self._drop_one()

    def _drop_one(self) -> None:
        """Drop the checkpoint whose loss is expected to cost the fewest recomputed tokens.

        Edits at a distance d from the end are assumed to have a probability proportional to 1 / d.
        A slot's last checkpoint is dropped only when every slot has at most one; then the oldest
        is dropped first.
        """
        candidates = []
        for slot, kept in enumerate(self._slots):
            lengths = [0, *(one.length for one in kept)]
            end = lengths[-1] + _LEAST_APART
            for i, one in enumerate(kept):
                weight = math.inf
                if i + 1 < len(kept):
                    weight = math.log((end - one.length) / (end - kept[i + 1].length))
                candidates.append(((one.length - lengths[i]) * weight, one.serial, slot, i))
        *_, slot, number = min(candidates)
        del self._slots[slot][number]

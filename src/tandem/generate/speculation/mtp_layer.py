"""One MTP layer with slots of its own, and the pairs that it reads into them.

For each position a layer reads a pair of a token and a hidden state. The first layer, layer 0,
reads the next token and the model's hidden state at the position; layer i reads the token i + 1
positions later and the output of layer i - 1 at the position. A sequence's pairs may begin after
its first position. Pairs are read for good when their tokens are certain; pairs of drafted tokens
are read on trial, and removed from the slot after drafting.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.decode.cpu_slots import CpuSlotPool
from tandem.decode.mtp.embedding import MtpEmbedding
from tandem.generate.speculation.draft_model import Guess, NewPool, read

_READ_AT_ONCE = 1024  # pairs
# At least this many are read as soon as they come, not when a draft is asked for.
PROMPT_TOKENS = 32


@dataclass(slots=True)
class _Pairs:
    """The state of one sequence's pairs: how many are read, and hidden states of unread pairs."""

    start: int
    """Position of the slot's first pair."""
    first: int
    """Position of the first row of `rows`."""
    rows: Tensor
    """Hidden states of unread pairs, from position `first` on: (positions, width)."""

    @property
    def num_read(self) -> int:
        """The number of pairs that the slot has read."""
        return self.first - self.start

    def cut_to(self, num_read: int) -> None:
        """Make all pairs after the first `num_read` unread again, with zeros as hidden states."""
        num_dropped = self.num_read - num_read
        self.rows = torch.cat([self.rows.new_zeros(num_dropped, self.rows.shape[1]), self.rows])
        self.first -= num_dropped


class MtpLayer:
    """Reads the pairs of one MTP layer into slots, and guesses the next tokens."""

    def __init__(self, new_pool: NewPool, embedding: MtpEmbedding, depth: int) -> None:
        """Use slots of `new_pool`; `embedding` joins the token and the hidden state of a pair.

        `depth` is the layer's number; the first MTP layer has depth 0.
        """
        self._new_pool, self._embedding, self._depth = new_pool, embedding, depth
        self._pool: CpuSlotPool | None = None
        self._pairs: dict[int, _Pairs] = {}
        self._last: dict[int, Tensor] = {}
        self._tried: dict[int, Tensor] = {}
        self.after: MtpLayer | None = None
        """The next MTP layer, which reads this layer's outputs for certain pairs."""

    def forget(self) -> None:
        """Drop all slots and pairs."""
        self._pool = None
        self._pairs.clear()

    def slots(self, count: int) -> CpuSlotPool:
        """Return the layer's slots; creates `count` of them on first use."""
        if self._pool is None:
            self._pool = self._new_pool(count)
        return self._pool

    def knows(self, slot: int) -> bool:
        """Tell whether the layer has pairs of a slot's sequence, read or unread."""
        return slot in self._pairs

    def num_waiting(self, slot: int) -> int:
        """Return how many pairs of a sequence are unread."""
        return len(self._pairs[slot].rows) if slot in self._pairs else 0

    def note(self, slot: int, first: int, made: Tensor) -> None:
        """Append the hidden states `made` for a sequence's positions from `first` on.

        Previously recorded hidden states of these and later positions are dropped, in later MTP
        layers too. If `first` does not follow the last recorded position, the pairs begin at
        `first`.
        """
        self._cut(slot, first)
        known = self._pairs.get(slot)
        if known is not None and first == known.first + len(known.rows):
            known.rows = torch.cat([known.rows, made])
            return
        self._pairs[slot] = _Pairs(first, first, made.clone())
        if self.after is not None:
            self.after._cut(slot, 0)

    def _cut(self, slot: int, first: int) -> None:
        """Drop a sequence's hidden states from position `first` on, in later layers too."""
        known = self._pairs.get(slot)
        if known is not None and first <= known.start:
            del self._pairs[slot]
        elif known is not None:
            known.rows = known.rows[: max(0, first - known.first)]
            known.first = min(known.first, first)
        if self.after is not None:
            self.after._cut(slot, first)

    def read_certain(self, sequences: Mapping[int, Sequence[int]]) -> dict[int, Guess]:
        """Read all unread pairs whose tokens are in `sequences` (tokens by slot).

        Returns a guess of the next token for each slot that has read a pair.
        """
        tokens: dict[int, Sequence[int]] = {}
        rows, firsts = [], {}
        for slot, sequence in sequences.items():
            self._go_on(slot, sequence)
            pairs = self._pairs[slot]
            found = sequence[pairs.first + 1 + self._depth :][: len(pairs.rows)]
            if found:
                tokens[slot], firsts[slot] = found, pairs.first
                rows.append(pairs.rows[: len(found)])
                pairs.rows = pairs.rows[len(found) :]
                pairs.first += len(found)
        return self._read(tokens, rows, firsts)

    def read_tried(
        self, drafted: Mapping[int, Sequence[int]], before: "MtpLayer"
    ) -> dict[int, Guess]:
        """Read on trial the unread pairs, then pairs of the outputs of layer `before` on trial.

        `drafted` are the drafted tokens by slot. The slots must be in `CpuSlotPool.on_trial`; the
        pairs still count as unread. Returns a guess of the next token for each slot.
        """
        tokens, rows = {}, []
        for slot, new in drafted.items():
            waiting, tried = self._pairs[slot].rows, before._tried.get(slot)
            rows.append(waiting if tried is None else torch.cat([waiting, tried]))
            tokens[slot] = new[-len(rows[-1]) :]
        return self._read(tokens, rows, None)

    def write_on(self, lasts: Mapping[int, int]) -> dict[int, Guess]:
        """Read each slot's last drafted token, paired with the layer's last output for the slot.

        Returns a guess of the next token for each slot.
        """
        rows = [self._last[slot] for slot in lasts]
        return self._read({slot: (last,) for slot, last in lasts.items()}, rows, None)

    def _go_on(self, slot: int, sequence: Sequence[int]) -> None:
        """Keep the pairs that a slot has read up to the first token that differs from `sequence`.

        Later pairs become unread again. If the slot cannot be cut there, it is emptied, and its
        pairs begin at the first unread pair.
        """
        assert self._pool is not None
        pool, pairs = self._pool, self._pairs[slot]
        held = pool.held(slot)[: pairs.num_read]
        of_pairs = sequence[pairs.start + 1 + self._depth :]
        both = zip(held, of_pairs, strict=False)
        most = min(len(held), len(of_pairs))
        shared = next((i for i, (old, new) in enumerate(both) if old != new), most)
        pool.keep(slot, pool.usable(slot, shared))
        if len(held) < pairs.num_read or len(pool.held(slot)) < shared:  # new slots are empty
            pairs.start = pairs.first
            pool.keep(slot, 0)
        elif shared < pairs.num_read:
            pairs.cut_to(shared)

    def _read(
        self,
        tokens: Mapping[int, Sequence[int]],
        rows: Sequence[Tensor],
        firsts: Mapping[int, int] | None,
    ) -> dict[int, Guess]:
        """Read pairs of `tokens` (by slot) and hidden states; return guesses of the next tokens.

        `rows` has the hidden states of each slot, in the order of `tokens`. `firsts` has the
        position of each slot's first pair in this call; None: the pairs are read on trial.
        """
        if not tokens:
            return {}
        if sum(map(len, tokens.values())) <= PROMPT_TOKENS:
            return self._read_together(tokens, torch.cat(list(rows)), firsts)
        guesses: dict[int, Guess] = {}
        for (slot, new), of_slot in zip(tokens.items(), rows, strict=True):
            for begin in range(0, len(new), _READ_AT_ONCE):
                part = slice(begin, begin + _READ_AT_ONCE)
                at = None if firsts is None else {slot: firsts[slot] + begin}
                guesses |= self._read_together({slot: new[part]}, of_slot[part], at)
        return guesses

    def _read_together(
        self,
        tokens: Mapping[int, Sequence[int]],
        rows: Tensor,
        firsts: Mapping[int, int] | None,
    ) -> dict[int, Guess]:
        assert self._pool is not None
        self._embedding.give(rows)
        guesses = dict(zip(tokens, read(self._pool, tokens), strict=True))
        assert self._pool.hidden is not None
        of_slots = self._pool.hidden.split([len(new) for new in tokens.values()])
        for slot, made in zip(tokens, of_slots, strict=True):
            self._last[slot] = made[-1:].clone()
            if firsts is None:
                self._tried[slot] = made.clone()
            elif self.after is not None:
                self.after.note(slot, firsts[slot], made)
        return guesses

"""A model's own MTP layer as drafter: it reads what the model's head has read.

For each position the layer takes the next token and what the model made of the tokens up to this
one: a pair. Those of a sequence lie in a slot of the layer's own, which may begin later than the
sequence: positions are relative. Pairs are read as soon as the tokens are certain.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tandem.decode.cpu_slots import CpuSlotPool
from tandem.decode.mtp.embedding import MtpEmbedding
from tandem.decode.slots import CachedSlotPool, SlotPool
from tandem.generate.speculation.draft_model import DraftModel, Guess, NewPool, read

_READ_AT_ONCE = 1024  # pairs
_PROMPT_TOKENS = 32  # so many are read when they come, not when a draft is asked for


@dataclass(slots=True)
class _Pairs:
    """What is known of a sequence."""

    start: int
    """Position of the first pair that the slot holds, or will."""
    first: int
    """Position of the first of `rows`, which are not read yet."""
    rows: Tensor
    """What the head has read, (positions, width)."""

    @property
    def num_read(self) -> int:
        """Pairs that the slot holds."""
        return self.first - self.start


class MtpDrafter(DraftModel):
    """Drafts with the layer again and again, each time from what it made of the last draft."""

    needs_hidden = True

    def __init__(self, new_pool: NewPool, embedding: MtpEmbedding, num_tokens: int) -> None:
        """Draft in slots of the layer, whose tokens `embedding` reads."""
        super().__init__(new_pool, num_tokens)
        self._embedding = embedding
        self._pairs: dict[int, _Pairs] = {}
        self._made: dict[int, Tensor] = {}

    def follow(self, main: SlotPool) -> None:
        """Hear of what the model's slots are given, from now on."""
        if main is not self._main:
            self._pairs.clear()
        super().follow(main)
        if isinstance(main, CachedSlotPool):  # others verify nothing
            main.on_hidden = self._note

    def _note(self, slot: int, first: int, hidden: Tensor) -> None:
        """Take what the head has read of a slot's tokens from position `first` on."""
        known = self._pairs.get(slot)
        if known is None or not known.start < first <= known.first + len(known.rows):
            self._pairs[slot] = _Pairs(first, first, hidden.clone())
        elif first > known.first:
            known.rows = torch.cat([known.rows[: first - known.first], hidden])
        else:  # what was made of the token before is gone, which a draft can do without
            known.rows = torch.cat([torch.zeros_like(hidden[:1]), hidden])
            known.first = first - 1
        if len(hidden) > _PROMPT_TOKENS and self._main is not None:
            self._read(self._slots(), {slot: self._main.held(slot)})

    def _catch_up(
        self, pool: CpuSlotPool, histories: Mapping[int, Sequence[int]]
    ) -> dict[int, Guess]:
        return self._read(pool, {n: x for n, x in histories.items() if n in self._pairs})

    def _read(self, pool: CpuSlotPool, sequences: Mapping[int, Sequence[int]]) -> dict[int, Guess]:
        """Read the pairs whose tokens are certain by now; return what may come after the last."""
        new: dict[int, Sequence[int]] = {}
        rows: list[Tensor] = []
        for slot, tokens in sequences.items():
            pairs = self._pairs[slot]
            held = min(pairs.num_read, len(pool.held(slot)))
            pool.keep(slot, pool.usable(slot, held))
            if len(pool.held(slot)) < pairs.num_read:  # new slots hold nothing
                pairs.start = pairs.first
                pool.keep(slot, 0)
            found = tokens[pairs.first + 1 : pairs.first + 1 + len(pairs.rows)]
            if found:
                new[slot] = found
                rows.append(pairs.rows[: len(found)])
                pairs.rows = pairs.rows[len(found) :]
                pairs.first += len(found)
        return self._read_pairs(pool, new, rows)

    def _read_pairs(
        self, pool: CpuSlotPool, tokens: Mapping[int, Sequence[int]], rows: Sequence[Tensor]
    ) -> dict[int, Guess]:
        """Read pairs of some slots; return what may come after each slot's last."""
        if not tokens:
            return {}
        if sum(map(len, tokens.values())) <= _PROMPT_TOKENS:
            return self._read_together(pool, tokens, torch.cat(list(rows)))
        drafts: dict[int, Guess] = {}
        for (slot, new), of_slot in zip(tokens.items(), rows, strict=True):
            for begin in range(0, len(new), _READ_AT_ONCE):
                part = slice(begin, begin + _READ_AT_ONCE)
                drafts |= self._read_together(pool, {slot: new[part]}, of_slot[part])
        return drafts

    def _read_together(
        self, pool: CpuSlotPool, tokens: Mapping[int, Sequence[int]], rows: Tensor
    ) -> dict[int, Guess]:
        self._embedding.give(rows)
        drafts = dict(zip(tokens, read(pool, tokens), strict=True))
        ends = list(accumulate(map(len, tokens.values())))
        self._note_made(pool, dict(zip(tokens, ends, strict=True)))
        return drafts

    def _written_on(self, pool: CpuSlotPool, lasts: Mapping[int, int]) -> list[Guess]:
        self._embedding.give(torch.stack([self._made[slot] for slot in lasts]))
        guesses = super()._written_on(pool, lasts)
        self._note_made(pool, {slot: row + 1 for row, slot in enumerate(lasts)})
        return guesses

    def _note_made(self, pool: CpuSlotPool, ends: Mapping[int, int]) -> None:
        """Keep what the layer has made of the last token of each slot; they end at rows."""
        assert pool.hidden is not None
        for slot, end in ends.items():
            self._made[slot] = pool.hidden[end - 1].clone()

"""A small model that drafts greedily, in sequence slots of its own."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.decode.cpu_slots import CpuSlotPool
from tandem.decode.slots import SlotPool, num_shared
from tandem.policy.speculation.drafter import SureDraft

NewPool = Callable[[int], CpuSlotPool]
"""Returns a pool with this many slots for the draft model."""

_MOST_STEP_TOKENS = 8  # tokens of a slot in one step; more are read as a prompt


class Guess(NamedTuple):
    """A token that may come next, with the drafting model's probability."""

    token: int
    sureness: float


class DraftModel:
    """Drafts with a small model; a sequence has the same slot number here as in the main model."""

    needs_hidden = False
    """Whether the drafter reads the hidden states that enter the main model's output head."""

    def __init__(self, new_pool: NewPool, num_tokens: int) -> None:
        """Take `new_pool`, which is called on first use; drafted ids will be below `num_tokens`."""
        self._new_pool, self._num_tokens = new_pool, num_tokens
        self._pool: CpuSlotPool | None = None
        self._main: SlotPool | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes that the draft model's slots take."""
        return 0 if self._pool is None else self._pool.num_bytes

    def follow(self, main: SlotPool) -> None:
        """Draft from now on for the sequences in `main`, the slots of the main model."""
        if main is not self._main:
            self._main, self._pool = main, None

    @torch.inference_mode()
    def draft(
        self, histories: Mapping[int, Sequence[int]], most: Mapping[int, int], least: float
    ) -> dict[int, SureDraft]:
        """Return drafts by slot, for the sequences in `histories` whose next token can be guessed.

        Afterwards the draft model's slots hold the sequences without drafted tokens. `most` limits
        each draft's number of tokens. A draft ends when the probability of all its tokens together
        falls below `least`.
        """
        pool = self._slots()
        drafts = {slot: [guess] for slot, guess in self._catch_up(pool, histories).items()}
        with self._writing_on(pool, list(drafts)):
            for length in range(1, max(most.values())):
                going_on = {
                    slot: guesses
                    for slot, guesses in drafts.items()
                    if len(guesses) == length < most[slot]
                    and prod(guess.sureness for guess in guesses) >= least
                }
                if not going_on:
                    break
                for slot, guess in self._written_on(pool, going_on).items():
                    drafts[slot].append(guess)
        return {slot: self._possible(guesses) for slot, guesses in drafts.items()}

    def _catch_up(
        self, pool: CpuSlotPool, histories: Mapping[int, Sequence[int]]
    ) -> dict[int, Guess]:
        """Read tokens of `histories` that slots lack; return guesses of next tokens by slot."""
        new = {}
        for slot, tokens in histories.items():
            shared = pool.usable(slot, num_shared(pool.held(slot), tokens))
            pool.keep(slot, shared)
            new[slot] = tokens[shared:]
        return dict(zip(new, read(pool, new), strict=True))

    def _writing_on(self, pool: CpuSlotPool, slots: Sequence[int]) -> AbstractContextManager[None]:
        """Return a context manager that at its end removes the tokens appended to `slots` in it."""
        return pool.on_trial(slots)

    def _written_on(
        self, pool: CpuSlotPool, drafts: Mapping[int, Sequence[Guess]]
    ) -> dict[int, Guess]:
        """Read the last token of each draft; return guesses of the next tokens by slot.

        All drafts must have the same length.
        """
        lasts = {slot: guesses[-1].token for slot, guesses in drafts.items()}
        return dict(zip(lasts, _best(pool.decode(lasts)), strict=True))

    def _slots(self) -> CpuSlotPool:
        assert self._main is not None
        if self._pool is None:
            self._pool = self._new_pool(self._main.num_slots)
        return self._pool

    def _possible(self, guesses: Sequence[Guess]) -> SureDraft:
        """Return guesses as a draft that ends before the first token that the main model lacks."""
        known = [*takewhile(lambda guess: guess.token < self._num_tokens, guesses)]
        return SureDraft([guess.token for guess in known], [guess.sureness for guess in known])


def read(pool: CpuSlotPool, tokens: Mapping[int, Sequence[int]]) -> list[Guess]:
    """Append tokens to slots; return the likeliest next token of each slot."""
    if max(map(len, tokens.values())) > _MOST_STEP_TOKENS:
        return _best(pool.prefill(tokens))
    lasts = torch.tensor([len(new) for new in tokens.values()], device="cpu").cumsum(0) - 1
    return _best(pool.verify(tokens)[lasts])


def _best(logits: Tensor) -> list[Guess]:
    """Return the likeliest token for each row of logits (n, vocabulary), with its probability."""
    values, tokens = logits.float().max(-1)
    surenesses = (values - logits.float().logsumexp(-1)).exp()
    return [*map(Guess, tokens.tolist(), surenesses.tolist())]

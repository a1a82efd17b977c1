"""Chooses the next token of each sequence; native code applies the rule in passes over the scores.

Scores are not sorted, which would take 13 ms for 150,000 scores: a cut such as top-p only needs the
least weight that it keeps, which is found by halving (`csrc/sampling.hpp`).
"""

import random
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.generate.sampling import SamplingRule
from tandem.kernels import _native, engine
from tandem.kernels.dense import VALUE_DTYPES


class Sampler:
    """Applies one sampling rule to a batch; each sequence draws from its own random numbers."""

    def __init__(self, rule: SamplingRule, batch: int, seed: int | None, *, isa: str = "") -> None:
        """Seed sequence i with `seed` + i, so that its text does not depend on other sequences.

        If `seed` is None, all seeds are random. `isa` names the kernels' instruction set; ""
        selects the best.
        """
        self._has_penalty = rule.repetition_penalty not in (None, 1.0)
        self._is_greedy = rule.temperature == 0
        seeds = [None if seed is None else seed + i for i in range(batch)]
        self._randoms = [random.Random(seed_of_one) for seed_of_one in seeds]
        self._seen = [_SeenTokens() for _ in range(batch if self._has_penalty else 0)]
        self._native = _native.TokenSampler(isa or engine.best_isa(), rule)

    @torch.inference_mode()
    def choose(self, logits: Tensor, histories: Sequence[Sequence[int]]) -> list[int]:
        """Return one token id per sequence; `logits` is (batch, vocabulary).

        `histories` holds each sequence's tokens so far, prompt included. Only a repetition penalty
        reads it. Between two calls a history may only grow.
        """
        if self._is_greedy and not self._has_penalty and logits.device.type != "cpu":
            best: list[int] = logits.argmax(-1).tolist()
            return best
        scores = logits.cpu()
        scores = (scores if scores.dtype in VALUE_DTYPES else scores.float()).contiguous()
        for seen, history in zip(self._seen, histories, strict=False):
            seen.note(history)
        return [self._choose(i, scores[i]) for i in range(len(scores))]

    def _choose(self, sequence: int, scores: Tensor) -> int:
        seen = self._seen[sequence].ids if self._seen else None
        uniform = 0.0 if self._is_greedy else self._randoms[sequence].random()
        return self._native.choose(scores, seen, uniform)


class _SeenTokens:
    """The distinct tokens of a growing history; `note` reads each token of the history once."""

    def __init__(self) -> None:
        self.ids = array("q")
        self._known: set[int] = set()
        self._num_noted = 0

    def note(self, history: Sequence[int]) -> None:
        """Add the history's new tokens."""
        new = {*history[self._num_noted :]} - self._known
        self.ids.extend(new)
        self._known |= new
        self._num_noted = len(history)

"""Counts how often expectations come true, so that a forecast's chances are frequencies."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tandem.policy.prediction.policy import CHANCE_BINS, Forecast

# Counting looks at every expert of a layer, so it happens only once per this many layers; both
# numbers are prime.
COUNT_EVERY = 101
COUNT_HINTED_EVERY = 13  # hints name few experts, so counting is cheaper
_HALVE_AT = 1e6


class Counts(NamedTuple):
    """What a `Calibration` has counted, by bin, and in how many layers it will count again."""

    seen: Sequence[float]
    came_true: Sequence[float]
    countdown: int
    count_every: int


class Calibration:
    """Counts, by bin of expected tokens, how often an expert with that expectation was used.

    At first, an expectation counts as a probability. There are `levels` tables of bins, one
    for each level of an expert's hints (see `hint_blend`); a calibration without hints has one.
    """

    def __init__(
        self, *, levels: int = 1, count_every: int = COUNT_EVERY, trust: float = 4.0
    ) -> None:
        """Start as if `trust` observations in each bin had confirmed the expectations."""
        size = levels * CHANCE_BINS
        self._seen = [trust] * size
        self._true = [trust * (place % CHANCE_BINS + 0.5) / CHANCE_BINS for place in range(size)]
        self.frequencies = [true / seen for true, seen in zip(self._true, self._seen, strict=True)]
        self._count_every = self._countdown = count_every

    def counts(self) -> Counts:
        """Return all counts; `restore` accepts them."""
        return Counts(self._seen, self._true, self._countdown, self._count_every)

    def restore(self, counts: Counts) -> None:
        """Continue with another calibration's counts, which must have as many levels."""
        self._seen, self._true = [*counts.seen], [*counts.came_true]
        self._countdown, self._count_every = counts.countdown, counts.count_every
        self.frequencies = [true / seen for true, seen in zip(self._true, self._seen, strict=True)]

    def is_due(self) -> bool:
        """Advance by one layer; tell whether to count its outcome. Few layers are counted."""
        self._countdown = self._countdown - 1 or self._count_every
        return self._countdown == self._count_every

    def observe(
        self, forecast: Forecast, active: Sequence[int], levels: Mapping[int, int] | None = None
    ) -> None:
        """Count which experts were `active`; `levels` has hinted experts' levels, others have 0."""
        used = set(active)
        base, scale = forecast.base, forecast.scale * CHANCE_BINS
        seen, true = self._seen, self._true
        for expert, score in enumerate(forecast.scores):
            place = min(CHANCE_BINS - 1, max(0, int((score - base) * scale)))
            if levels and expert in levels:
                place += levels[expert] * CHANCE_BINS
            seen[place] += 1.0
            true[place] += expert in used
        self.frequencies = [t / s for t, s in zip(true, seen, strict=True)]
        if seen[0] > _HALVE_AT:
            self._seen = [s / 2 for s in seen]
            self._true = [t / 2 for t in true]

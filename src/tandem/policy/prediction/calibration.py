"""Count how often expectations come true, so that a forecast's chances are frequencies."""

from collections.abc import Sequence

from tandem.policy.prediction.policy import CHANCE_BINS, Forecast

# Counting looks at every expert of a layer, so it is done for one layer in so many; a prime.
COUNT_EVERY = 101
_HALVE_AT = 1e6


class Calibration:
    """Frequencies by bin of expected tokens, starting from "an expectation is a probability"."""

    def __init__(self) -> None:
        """Start with a little trust in the expectations themselves."""
        self._seen = [4.0] * CHANCE_BINS
        self._true = [4.0 * (place + 0.5) / CHANCE_BINS for place in range(CHANCE_BINS)]
        self.frequencies = [true / seen for true, seen in zip(self._true, self._seen, strict=True)]
        self._countdown = COUNT_EVERY

    def is_due(self) -> bool:
        """Tell whether the layer that comes out now should be counted; most are not."""
        self._countdown = self._countdown - 1 or COUNT_EVERY
        return self._countdown == COUNT_EVERY

    def observe(self, forecast: Forecast, active: Sequence[int]) -> None:
        """Count how a forecast came out."""
        wanted = set(active)
        base, scale = forecast.base, forecast.scale * CHANCE_BINS
        seen, true = self._seen, self._true
        for expert, score in enumerate(forecast.scores):
            place = min(CHANCE_BINS - 1, max(0, int((score - base) * scale)))
            seen[place] += 1.0
            true[place] += expert in wanted
        self.frequencies = [t / s for t, s in zip(true, seen, strict=True)]
        if seen[0] > _HALVE_AT:
            self._seen = [s / 2 for s in seen]
            self._true = [t / 2 for t in true]

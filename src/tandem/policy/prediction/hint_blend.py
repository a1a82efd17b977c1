"""Adds router hints to a forecast: chances counted by expected tokens and by what the hints say.

How often does an expert come that was expected so much and that the hints named, or did not name?
A perfect hint makes the first certain and the second impossible, whatever was expected; a hint that
is no better than chance leaves both as they were.
"""

from collections.abc import Mapping, Sequence

from tandem.policy.plan import Hint
from tandem.policy.prediction.calibration import COUNT_HINTED_EVERY, Calibration, Counts
from tandem.policy.prediction.policy import CHANCE_BINS, Forecast

MAX_SOURCES = 2  # "gate" and "residual"
WEIGHTS = 3  # not named, named by one token, by several
TIE_BREAK = 1.0 / 1024  # of the expected tokens, among equal chances


class HintSources:
    """Who gives hints, in the order of their first ones."""

    def __init__(self) -> None:
        """Start with nobody."""
        self._names: list[str] = []

    def factor(self, name: str) -> int | None:
        """Return what a source's weights count among those of all; None for a third source."""
        if name not in self._names:
            if len(self._names) == MAX_SOURCES:
                return None
            self._names.append(name)
        return int(WEIGHTS ** self._names.index(name))


class HintBlend:
    """Keeps the hints of a step, and how often hints came true."""

    def __init__(self) -> None:
        """Start with hints that change nothing."""
        self._sources = HintSources()
        self._levels: dict[int, dict[int, int]] = {}  # layer -> expert -> level
        self._calibration = Calibration(
            levels=WEIGHTS**MAX_SOURCES, count_every=COUNT_HINTED_EVERY, trust=1.0
        )

    def begin_step(self) -> None:
        """Forget the hints of the step before."""
        self._levels.clear()

    def hint(self, hint: Hint) -> None:
        """Keep a hint; one of a third source is ignored, and one that names nobody."""
        factor = self._sources.factor(hint.source)
        if factor is None or not hint.load.experts:
            return
        levels = self._levels.setdefault(hint.load.layer, {})
        for expert, tokens in zip(hint.load.experts, hint.load.tokens, strict=True):
            level = levels.get(expert, 0) + min(tokens, WEIGHTS - 1) * factor
            levels[expert] = min(level, WEIGHTS**MAX_SOURCES - 1)  # a source may say it twice

    def counts(self) -> Counts:
        """Return what has been counted."""
        return self._calibration.counts()

    def restore(self, counts: Counts) -> None:
        """Go on with what another counter has counted."""
        self._calibration.restore(counts)

    def knows(self, layer: int) -> bool:
        """Tell whether there is a hint about a layer."""
        return layer in self._levels

    def take(self, layer: int) -> Mapping[int, int] | None:
        """Return what the hints say if it should be counted now; they are forgotten."""
        levels = self._levels.pop(layer, None)
        return levels if levels and self._calibration.is_due() else None

    def observe(self, forecast: Forecast, active: Sequence[int], levels: Mapping[int, int]) -> None:
        """Count how a forecast without hints, and the hints beside it, came out."""
        self._calibration.observe(forecast, active, levels)

    def blend(self, forecast: Forecast, layer: int) -> Forecast:
        """Return the forecast's chances given the hints; `scores` are then chances."""
        levels, chances = self._levels[layer], self._calibration.frequencies
        scores, base, scale = forecast.scores, forecast.base, forecast.scale
        first_bin = base + 1.0 / (CHANCE_BINS * scale)
        blended = [chances[0]] * len(scores)
        likely = [expert for expert, score in enumerate(scores) if score >= first_bin]
        for expert in (*likely, *levels):
            expected = (scores[expert] - base) * scale
            place = min(CHANCE_BINS - 1, max(0, int(expected * CHANCE_BINS)))
            chance = chances[place + levels.get(expert, 0) * CHANCE_BINS]
            blended[expert] = chance + TIE_BREAK * expected
        return Forecast(blended, 0.0, 1.0)

"""Blends router hints into a forecast: chances are counted by expected tokens and by hint.

For each bin of expected tokens, counts tell how often an expert is used if hints name it, and how
often if they do not. Perfect hints make experts that they name certain and all others impossible,
whatever was expected. Hints no better than chance change nothing.
"""

from collections.abc import Mapping, Sequence

from tandem.policy.plan import Hint
from tandem.policy.prediction.calibration import COUNT_HINTED_EVERY, Calibration, Counts
from tandem.policy.prediction.policy import CHANCE_BINS, Forecast

MAX_SOURCES = 2  # "gate" and "residual"
WEIGHTS = 3  # not named, named by one token, named by several
TIE_BREAK = 1.0 / 1024  # per expected token; breaks ties between equal chances


class HintSources:
    """The sources of hints, in the order of their first hints."""

    def __init__(self) -> None:
        """Start without sources."""
        self._names: list[str] = []

    def factor(self, name: str) -> int | None:
        """Return a source's place value in levels, a power of WEIGHTS; None for a third source.

        An expert's level is the sum, over the sources, of place value times weight. The weight is 0
        if the source does not name the expert, 1 if it does for one token, 2 if for several tokens.
        """
        if name not in self._names:
            if len(self._names) == MAX_SOURCES:
                return None
            self._names.append(name)
        return int(WEIGHTS ** self._names.index(name))


class HintBlend:
    """The hints of a step, and counts of how often hints came true."""

    def __init__(self) -> None:
        """Start with counts under which hints change no forecast."""
        self._sources = HintSources()
        self._levels: dict[int, dict[int, int]] = {}  # layer -> expert -> level
        self._calibration = Calibration(
            levels=WEIGHTS**MAX_SOURCES, count_every=COUNT_HINTED_EVERY, trust=1.0
        )

    def begin_step(self) -> None:
        """Drop the hints of the last step."""
        self._levels.clear()

    def hint(self, hint: Hint) -> None:
        """Keep a hint; empty hints, and hints of a third source, are ignored."""
        factor = self._sources.factor(hint.source)
        if factor is None or not hint.load.experts:
            return
        levels = self._levels.setdefault(hint.load.layer, {})
        for expert, tokens in zip(hint.load.experts, hint.load.tokens, strict=True):
            level = levels.get(expert, 0) + min(tokens, WEIGHTS - 1) * factor
            # A source may name an expert twice.
            levels[expert] = min(level, WEIGHTS**MAX_SOURCES - 1)

    def counts(self) -> Counts:
        """Return the counts of how often hints came true; `restore` accepts them."""
        return self._calibration.counts()

    def restore(self, counts: Counts) -> None:
        """Continue with the counts of another `HintBlend`."""
        self._calibration.restore(counts)

    def knows(self, layer: int) -> bool:
        """Tell whether there is a hint for a layer."""
        return layer in self._levels

    def take(self, layer: int) -> Mapping[int, int] | None:
        """Remove a layer's hints; return their levels by expert if they should be counted.

        Returns None if the layer has no hints, or if its hints should not be counted.
        """
        levels = self._levels.pop(layer, None)
        return levels if levels and self._calibration.is_due() else None

    def observe(self, forecast: Forecast, active: Sequence[int], levels: Mapping[int, int]) -> None:
        """Count the outcome of a forecast made without hints; `levels` must come from `take`."""
        self._calibration.observe(forecast, active, levels)

    def blend(self, forecast: Forecast, layer: int) -> Forecast:
        """Return `forecast` with a layer's hints blended in; the result's `scores` are chances."""
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

"""Expert prediction: how many tokens each expert of a layer will get, before its router has run."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tandem.policy.plan import Geometry, Hint, LayerLoad

CHANCE_BINS = 16


class Forecast(NamedTuple):
    """Expected tokens of each expert of a layer: (scores[expert] - base) * scale."""

    scores: Sequence[float]
    base: float
    scale: float
    frequencies: Sequence[float] | None = None  # how often such an expectation came true, by bin

    def chance(self, score: float) -> float:
        """Return the probability that an expert of this score is active."""
        expected = (score - self.base) * self.scale
        if self.frequencies is None:
            return min(1.0, expected)
        return self.frequencies[min(CHANCE_BINS - 1, max(0, int(expected * CHANCE_BINS)))]

    def least_score(self, chance: float) -> float:
        """Return a score below which no expert has more than this chance."""
        expected = chance
        if self.frequencies is not None:
            likely = [place for place, true in enumerate(self.frequencies) if true > chance]
            expected = likely[0] / CHANCE_BINS if likely else float("inf")
        return self.base + expected / self.scale


class Prediction(Protocol):
    """Predicts loads; learns from every load it observes. Left out: nothing noted, no hints."""

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """Note the tokens of a new step; empty if they are unknown."""
        return  # not abstract

    def hint(self, hint: Hint) -> None:
        """Take a load that the engine predicted with a router, for a layer to come."""
        return  # not abstract

    def is_hinted(self, layer: int) -> bool:
        """Tell whether the layer's own router has been asked in this step."""
        return False

    def observe(self, load: LayerLoad) -> None:
        """Note a layer's real load; layers come in order within a step."""
        return  # not abstract

    def learn(self) -> None:
        """Learn from what was noted, which a plan does not wait for; when changes no answer."""
        return  # not abstract

    def predict(self, layer: int) -> Forecast | None:
        """Return the forecast of a layer that this step has not reached; None if there is none."""


class NoPrediction(Prediction):
    """Predicts nothing: the baseline of every prefetch."""

    def __init__(self, geometry: Geometry) -> None:
        """Ignore the geometry."""

    def predict(self, layer: int) -> Forecast | None:
        """Return no forecast."""
        return None

"""Expert prediction: how many tokens each expert of a layer will get, before its router runs."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tandem.policy.plan import Geometry, Hint, LayerLoad

CHANCE_BINS = 16


class Forecast(NamedTuple):
    """The expected tokens of each expert of a layer: (scores[expert] - base) * scale."""

    scores: Sequence[float]
    base: float
    scale: float
    frequencies: Sequence[float] | None = None  # bin -> how often such an expectation came true

    def chance(self, score: float) -> float:
        """Return the probability that an expert with this score is active."""
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
    """Predicts loads, and learns from observed loads.

    By default a prediction records nothing and ignores hints.
    """

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """Begin a step with these token ids; empty if they are unknown."""
        return  # not abstract

    def hint(self, hint: Hint) -> None:
        """Record a coming layer's load, as predicted by running its router ahead."""
        return  # not abstract

    def is_hinted(self, layer: int) -> bool:
        """Tell whether there is a hint for the layer in this step."""
        return False

    def observe(self, load: LayerLoad) -> None:
        """Record a layer's real load; must be called in the order of layers within a step."""
        return  # not abstract

    def learn(self) -> None:
        """Learn from recorded loads.

        The time of this call must not change any answer, so plans need not wait for it.
        """
        return  # not abstract

    def predict(self, layer: int) -> Forecast | None:
        """Return the forecast of a layer that the step has not reached; None if there is none."""


class NoPrediction(Prediction):
    """Predicts nothing: the baseline of every prediction."""

    def __init__(self, geometry: Geometry) -> None:
        """Ignore the geometry."""

    def predict(self, layer: int) -> Forecast | None:
        """Return None: there is no forecast."""
        return None

"""Experts that recur some layers later, at a distance found from the data.

In Qwen3 models the experts of layer l come again in layer l + 12. No name is consulted: for each
distance the overlap is measured, and the best is used if it is well above chance.
"""

from collections.abc import Sequence

from tandem.policy.plan import Geometry, LayerLoad
from tandem.policy.prediction.policy import Forecast, Prediction

MAX_LAG = 24
ABOVE_CHANCE = 2.0  # times the overlap of independent choices
RATE = 1 / 256


class Lag(Prediction):
    """Predicts the load of the layer that lies the found distance above."""

    def __init__(self, geometry: Geometry) -> None:
        """Start without a distance."""
        self._geometry = geometry
        self._overlap = [0.0] * (min(MAX_LAG, geometry.num_layers - 1) + 1)
        self._chance = 0.0
        self._step: dict[int, LayerLoad] = {}
        self._masks: dict[int, int] = {}

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """Forget the step before."""
        self._step.clear()
        self._masks.clear()

    def observe(self, load: LayerLoad) -> None:
        """Measure the overlap with each layer above, by distance."""
        layer, count = load.layer, len(load.experts)
        mask = 0
        for expert in load.experts:
            mask |= 1 << expert
        for lag in range(1, min(len(self._overlap) - 1, layer) + 1):
            share = (mask & self._masks.get(layer - lag, 0)).bit_count() / count
            self._overlap[lag] += RATE * (share - self._overlap[lag])
        self._chance += RATE * (count / self._geometry.num_experts - self._chance)
        self._step[layer], self._masks[layer] = load, mask

    def distance(self) -> int | None:
        """Return the distance of the largest overlap; None if it is not well above chance."""
        best = max(range(len(self._overlap)), key=self._overlap.__getitem__)
        return best if self._overlap[best] > ABOVE_CHANCE * self._chance > 0.0 else None

    def predict(self, layer: int) -> Forecast | None:
        """Return the load that the found distance above had in this step."""
        distance = self.distance()
        above = self._step.get(layer - distance) if distance is not None else None
        if distance is None or above is None:
            return None
        scores = [0.0] * self._geometry.num_experts
        for expert, tokens in zip(above.experts, above.tokens, strict=True):
            scores[expert] = tokens
        return Forecast(scores, 0.0, self._overlap[distance])

"""Popularity: what a layer has used most over the run (EdgeMoE's statistics, learned online)."""

from tandem.policy.decay import DecayedCounts
from tandem.policy.plan import Geometry, LayerLoad
from tandem.policy.prediction.policy import Forecast, Prediction

DECAY = 0.995


class Popularity(Prediction):
    """Predicts the decayed mean load."""

    def __init__(self, geometry: Geometry) -> None:
        """Start with nothing seen."""
        self._num_experts = geometry.num_experts
        self._counts = DecayedCounts(geometry.num_layers, geometry.num_experts, DECAY)
        self._weight = [0.0] * geometry.num_layers

    def observe(self, load: LayerLoad) -> None:
        """Add a layer's load."""
        layer = load.layer
        self._counts.tick(layer)
        self._weight[layer] = self._weight[layer] * DECAY + 1.0
        for expert, tokens in zip(load.experts, load.tokens, strict=True):
            self._counts.add(layer, expert, tokens)

    def predict(self, layer: int) -> Forecast | None:
        """Return the mean load."""
        if not self._weight[layer]:
            return None
        first = layer * self._num_experts
        scores = self._counts.raw[first : first + self._num_experts]
        return Forecast(scores, 0.0, 1.0 / (self._counts.unit[layer] * self._weight[layer]))

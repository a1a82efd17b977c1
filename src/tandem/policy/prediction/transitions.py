"""Transition tables learned online: which experts follow those of the layer above."""

from collections.abc import Sequence

from tandem.policy.lanes import ONE, Lanes
from tandem.policy.plan import Geometry, LayerLoad
from tandem.policy.prediction.policy import Forecast, Prediction
from tandem.policy.regression import sum_rows

SHIFT = 5  # a row moves by 1/32 towards what followed


class Transitions(Prediction):
    """Predicts the mean of what followed each expert that the layer above uses now."""

    def __init__(self, geometry: Geometry) -> None:
        """Start with all experts equally likely."""
        self._lanes = Lanes(geometry.num_experts)
        row = self._lanes.filled(geometry.top_k / geometry.num_experts)
        self._rows = [[row] * geometry.num_experts for _ in range(geometry.num_layers)]
        self._last: LayerLoad | None = None

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """Start above the first layer."""
        self._last = None

    def observe(self, load: LayerLoad) -> None:
        """Move the rows of the layer above towards this load."""
        if self._last is not None and self._last.layer == load.layer - 1:
            used, rows = self._lanes.used(load.experts), self._rows[load.layer]
            for expert in self._last.experts:
                rows[expert] = self._lanes.moved(rows[expert], used, SHIFT)
        self._last = load

    def predict(self, layer: int) -> Forecast | None:
        """Return the mean of the active rows; only of the layer below the last observed."""
        if self._last is None or self._last.layer != layer - 1:
            return None
        experts = self._last.experts
        scores = self._lanes.read(sum_rows(self._rows[layer], experts))
        return Forecast(scores, 0.0, 1.0 / (ONE * len(experts)))

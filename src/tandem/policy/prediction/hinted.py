"""Gate look-ahead: the next routers, asked with the hidden state of this layer.

The engine computes it and passes it as a `Hint`: "gate" with the hidden state as it is (HybriMoE),
"residual" after adding DALI's calibrated residual vector (equations 10 and 11).
"""

from collections.abc import Sequence

from tandem.policy.plan import Geometry, Hint, LayerLoad
from tandem.policy.prediction.calibration import Calibration
from tandem.policy.prediction.policy import Forecast


class Hinted:
    """Predicts what hints of one source say."""

    def __init__(self, geometry: Geometry, *, source: str) -> None:
        """Listen to hints of `source`."""
        self._num_experts = geometry.num_experts
        self._source = source
        self._forecasts: dict[int, Forecast] = {}
        self._calibration = Calibration()

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """Forget the hints of the step before."""
        self._forecasts.clear()

    def hint(self, hint: Hint) -> None:
        """Keep a hint of the right source."""
        if hint.source != self._source:
            return
        scores = [0.0] * self._num_experts
        for expert, tokens in zip(hint.load.experts, hint.load.tokens, strict=True):
            scores[expert] = tokens
        frequencies = self._calibration.frequencies
        self._forecasts[hint.load.layer] = Forecast(scores, 0.0, 1.0, frequencies)

    def observe(self, load: LayerLoad) -> None:
        """Count how the hint came out."""
        forecast = self._forecasts.pop(load.layer, None)
        if forecast is not None and self._calibration.is_due():
            self._calibration.observe(forecast, load.experts)

    def is_hinted(self, layer: int) -> bool:
        """Tell whether there is a hint."""
        return layer in self._forecasts

    def predict(self, layer: int) -> Forecast | None:
        """Return the hint of a layer."""
        return self._forecasts.get(layer)

"""No prediction: the simplest implementation, and the baseline of every prefetch."""

from tandem.policy.plan import Geometry
from tandem.policy.prediction.policy import Forecast, Prediction


class Nothing(Prediction):
    """Predicts nothing."""

    def __init__(self, geometry: Geometry) -> None:
        """Ignore the geometry."""

    def predict(self, layer: int) -> Forecast | None:
        """Return no forecast."""
        return None

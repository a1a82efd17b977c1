"""No prediction: the simplest implementation, and the baseline of every prefetch."""

from collections.abc import Sequence

from tandem.policy.plan import Geometry, Hint, LayerLoad
from tandem.policy.prediction.policy import Forecast


class Nothing:
    """Predicts nothing."""

    def __init__(self, geometry: Geometry) -> None:
        """Ignore the geometry."""

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """No-op."""

    def hint(self, hint: Hint) -> None:
        """No-op."""

    def observe(self, load: LayerLoad) -> None:
        """No-op."""

    def predict(self, layer: int) -> Forecast | None:
        """Return no forecast."""
        return None

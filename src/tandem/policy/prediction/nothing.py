"""No prediction: the simplest implementation, and the baseline of every prefetch."""

from collections.abc import Sequence

from tandem.policy.plan import Geometry, Hint, LayerLoad
from tandem.policy.prediction.policy import Forecast


class Nothing:
    """Foresees nothing."""

    def __init__(self, geometry: Geometry) -> None:
        """Keep nothing."""

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """Need nothing."""

    def hint(self, hint: Hint) -> None:
        """Need nothing."""

    def observe(self, load: LayerLoad) -> None:
        """Need nothing."""

    def predict(self, layer: int) -> Forecast | None:
        """Return no forecast."""
        return None

"""First in, first out, inserted on every miss: paper 2's default."""

from collections.abc import Sequence

from tandem.policy.eviction.policy import Eviction
from tandem.policy.plan import Geometry


class Fifo(Eviction):
    """Keeps the experts that came last."""

    background = "always"

    def __init__(self, geometry: Geometry) -> None:
        """Start with nothing inserted."""
        self._arrival = [0] * (geometry.num_layers * geometry.num_experts)
        self._inserted = 0

    def scores(self, keys: Sequence[int]) -> list[float]:
        """Return the number of the insertion."""
        arrival = self._arrival
        return [arrival[key] for key in keys]

    def inserted(self, key: int) -> None:
        """Number the insertion."""
        self._inserted += 1
        self._arrival[key] = self._inserted

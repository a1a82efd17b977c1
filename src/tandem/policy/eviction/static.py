"""Nothing ever moves: the cache keeps what it was started with."""

from collections.abc import Sequence

from tandem.policy.eviction.policy import Eviction
from tandem.policy.plan import Geometry


class Static(Eviction):
    """Admits no expert."""

    background = "never"

    def __init__(self, geometry: Geometry) -> None:
        """Keep nothing."""

    def candidates(
        self, layer: int, misses: Sequence[int], slot_of: Sequence[int]
    ) -> Sequence[int]:
        """Return no expert."""
        return ()

    def scores(self, keys: Sequence[int]) -> list[float]:
        """Return the same for all."""
        return [0.0] * len(keys)

    def admits(self, newcomer: float, victim: float) -> bool:
        """Admit no expert."""
        return False

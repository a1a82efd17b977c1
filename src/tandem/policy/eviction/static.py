"""Nothing ever moves: the cache keeps what it was started with."""

from collections.abc import Sequence

from tandem.policy.plan import Geometry, LayerLoad


class Static:
    """Admits no expert."""

    background = "never"
    reads_weights = False

    def __init__(self, geometry: Geometry) -> None:
        """Keep nothing."""

    def begin_step(self, *, is_prefill: bool) -> None:
        """No-op."""

    def touch(self, load: LayerLoad) -> None:
        """No-op."""

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

    def inserted(self, key: int) -> None:
        """No-op."""

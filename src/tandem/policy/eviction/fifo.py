"""First in, first out, inserted on every miss: paper 2's default."""

from collections.abc import Sequence

from tandem.policy.plan import Geometry, LayerLoad


class Fifo:
    """Keeps the experts that came last."""

    background = "always"
    reads_weights = False

    def __init__(self, geometry: Geometry) -> None:
        """Start with nothing inserted."""
        self._arrival = [0] * (geometry.num_layers * geometry.num_experts)
        self._inserted = 0

    def begin_step(self, *, is_prefill: bool) -> None:
        """No-op."""

    def touch(self, load: LayerLoad) -> None:
        """No-op."""

    def candidates(
        self, layer: int, misses: Sequence[int], slot_of: Sequence[int]
    ) -> Sequence[int]:
        """Return every miss."""
        return misses

    def scores(self, keys: Sequence[int]) -> list[float]:
        """Return the number of the insertion."""
        arrival = self._arrival
        return [arrival[key] for key in keys]

    def admits(self, newcomer: float, victim: float) -> bool:
        """Admit always."""
        return True

    def inserted(self, key: int) -> None:
        """Number the insertion."""
        self._inserted += 1
        self._arrival[key] = self._inserted

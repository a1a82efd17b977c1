"""Least frequently used: counts of tokens over the whole run, inserted on every miss."""

from collections.abc import Sequence

from tandem.policy.plan import Geometry, LayerLoad


class Lfu:
    """Keeps the experts with the most tokens so far."""

    background = "always"
    reads_weights = False

    def __init__(self, geometry: Geometry) -> None:
        """Start all counts at zero."""
        self._num_experts = geometry.num_experts
        self._count = [0] * (geometry.num_layers * geometry.num_experts)

    def begin_step(self, *, is_prefill: bool) -> None:
        """No-op."""

    def touch(self, load: LayerLoad) -> None:
        """Count the tokens."""
        first, count = load.layer * self._num_experts, self._count
        for expert, tokens in zip(load.experts, load.tokens, strict=True):
            count[first + expert] += tokens

    def candidates(
        self, layer: int, misses: Sequence[int], slot_of: Sequence[int]
    ) -> Sequence[int]:
        """Return every miss."""
        return misses

    def scores(self, keys: Sequence[int]) -> list[float]:
        """Return the tokens so far."""
        count = self._count
        return [count[key] for key in keys]

    def admits(self, newcomer: float, victim: float) -> bool:
        """Admit always."""
        return True

    def inserted(self, key: int) -> None:
        """No-op."""

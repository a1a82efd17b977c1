"""Least frequently used: counts of tokens over the whole run, inserted on every miss."""

from collections.abc import Sequence

from tandem.policy.eviction.policy import Eviction
from tandem.policy.plan import Geometry, LayerLoad


class Lfu(Eviction):
    """Keeps the experts with the most tokens so far."""

    background = "always"

    def __init__(self, geometry: Geometry) -> None:
        """Start all counts at zero."""
        self._num_experts = geometry.num_experts
        self._count = [0] * (geometry.num_layers * geometry.num_experts)

    def touch(self, load: LayerLoad) -> None:
        """Count the tokens."""
        first, count = load.layer * self._num_experts, self._count
        for expert, tokens in zip(load.experts, load.tokens, strict=True):
            count[first + expert] += tokens

    def scores(self, keys: Sequence[int]) -> list[float]:
        """Return the tokens so far."""
        count = self._count
        return [count[key] for key in keys]

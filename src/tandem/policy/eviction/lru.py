"""Least recently used, inserted on every miss. Also the shape of an eviction policy."""

from collections.abc import Sequence

from tandem.policy.eviction.policy import Eviction
from tandem.policy.plan import Geometry, LayerLoad


class Lru(Eviction):
    """Keeps the experts that were used last."""

    background = "always"

    def __init__(self, geometry: Geometry) -> None:
        """Start with nothing ever used."""
        self._num_experts = geometry.num_experts
        self._last_use = [-1] * (geometry.num_layers * geometry.num_experts)
        self._step = 0

    def begin_step(self, *, is_prefill: bool) -> None:
        """Advance the clock."""
        self._step += 1

    def touch(self, load: LayerLoad) -> None:
        """Stamp every active expert."""
        first, step, last_use = load.layer * self._num_experts, self._step, self._last_use
        for expert in load.experts:
            last_use[first + expert] = step

    def scores(self, keys: Sequence[int]) -> list[float]:
        """Return the step of the last use."""
        last_use = self._last_use
        return [last_use[key] for key in keys]

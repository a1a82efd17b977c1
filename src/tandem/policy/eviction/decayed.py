"""Decayed counts: how often an expert occurred, recent steps weighing more; admission by score."""

from collections.abc import Sequence

from tandem.policy.decay import DecayedCounts
from tandem.policy.eviction.policy import Eviction
from tandem.policy.plan import Geometry, LayerLoad


class Decayed(Eviction):
    """Keeps the experts with the highest decayed token count."""

    background = "idle"

    def __init__(self, geometry: Geometry, *, decay: float = 0.97) -> None:
        """Weigh a step `decay` times the step after it."""
        self._counts = DecayedCounts(geometry.num_layers, geometry.num_experts, decay)

    def touch(self, load: LayerLoad) -> None:
        """Count the tokens."""
        self._counts.tick(load.layer)
        for expert, tokens in zip(load.experts, load.tokens, strict=True):
            self._counts.add(load.layer, expert, tokens)

    def scores(self, keys: Sequence[int]) -> list[float]:
        """Return the decayed counts."""
        return self._counts.of(keys)

    def admits(self, newcomer: float, victim: float) -> bool:
        """Admit the better one."""
        return newcomer > victim

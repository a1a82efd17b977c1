"""Eviction and admission: which expert leaves a full expert cache, and which miss may enter it."""

from collections.abc import Sequence
from typing import Protocol

from tandem.policy.plan import LayerLoad


class Eviction(Protocol):
    """Ranks experts by a score. Experts are named by key (`Geometry.key`).

    Defaults of a subclass: it has no phases, every miss enters, and no newcomer is refused.
    """

    # Whether a miss that the CPU computes is copied for later: "always", "never", or "idle": if the
    # link has time.
    background: str
    reads_weights: bool = False
    """Whether `touch` reads the gate weights of a load, which else are left out."""

    def resized(self, set_sizes: Sequence[int]) -> None:
        """Learn how many slots each set of the cache has: one per layer, or one for all."""
        return  # not abstract

    def rule(self, layer: int) -> str:
        """Return the rule by which a layer was last ranked, if the policy chooses among several."""
        return ""

    def begin_step(self, *, is_prefill: bool) -> None:
        """Note that a new step starts."""
        return  # not abstract

    def touch(self, load: LayerLoad) -> None:
        """Note what a layer uses now; called once per layer and step, before planning."""
        return  # not abstract

    def learn(self) -> None:
        """Learn from what was noted, which a plan does not wait for; when changes no answer."""
        return  # not abstract

    def candidates(
        self, layer: int, misses: Sequence[int], slot_of: Sequence[int]
    ) -> Sequence[int]:
        """Return absent keys of the layer (slot_of < 0) that should enter, best first."""
        return misses

    def scores(self, keys: Sequence[int]) -> list[float]:
        """Return each expert's score; the lowest is evicted first."""

    def admits(self, newcomer: float, victim: float) -> bool:
        """Tell by their scores whether a newcomer may replace the victim."""
        return True

    def inserted(self, key: int) -> None:
        """Learn that an expert has got a slot."""
        return  # not abstract

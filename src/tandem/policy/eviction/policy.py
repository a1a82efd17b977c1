"""Eviction and admission: which expert leaves a full expert cache, and which miss may enter."""

from collections.abc import Sequence
from typing import Protocol

from tandem.policy.plan import LayerLoad


class Eviction(Protocol):
    """Ranks experts by a score. Experts are named by key (`Geometry.key`).

    By default a policy treats prefills like other steps, every miss is a candidate, and no newcomer
    is refused.
    """

    # Whether a miss that the CPU computes is copied for later: "always", "never", or "idle" (if the
    # link has time).
    background: str
    reads_weights: bool = False
    """Whether `touch` reads a load's gate weights; if not, loads come without weights."""

    def resized(self, set_sizes: Sequence[int]) -> None:
        """Set how many slots each set of the cache has: one set per layer, or one for all."""
        return  # not abstract

    def rule(self, layer: int) -> str:
        """Return the name of the rule that ranked a layer last; empty if the policy has none."""
        return ""

    def begin_step(self, *, is_prefill: bool) -> None:
        """Begin a step."""
        return  # not abstract

    def touch(self, load: LayerLoad) -> None:
        """Record the experts that a layer uses; called once per layer and step, before planning."""
        return  # not abstract

    def learn(self) -> None:
        """Learn from recorded uses.

        The time of this call must not change any answer, so plans need not wait for it.
        """
        return  # not abstract

    def candidates(
        self, layer: int, misses: Sequence[int], slot_of: Sequence[int]
    ) -> Sequence[int]:
        """Return experts of the layer that should enter the cache, best first.

        `misses` includes staged experts. Other experts may enter if they are absent: slot_of < 0.
        """
        return misses

    def scores(self, keys: Sequence[int]) -> list[float]:
        """Return each expert's score; the lowest one is evicted first."""

    def admits(self, newcomer: float, victim: float) -> bool:
        """Return whether an expert of score `newcomer` may replace one of score `victim`."""
        return True

    def inserted(self, key: int) -> None:
        """Record that an expert has entered a slot."""
        return  # not abstract

"""Paper 2: the CPU computes a miss while it is copied into the cache, up to a quota per step."""

from collections.abc import Sequence

from tandem.policy.eviction.lru import Lru
from tandem.policy.eviction.policy import Eviction
from tandem.policy.plan import Geometry, LayerLoad


class CopyOnMiss(Eviction):
    """LRU whose insertions are limited by a quota that is renewed at each step; decode only."""

    background = "always"

    def __init__(self, geometry: Geometry, *, quota: int = 64) -> None:
        """Allow `quota` - 1 copies per step: the code counts down before it compares."""
        self._lru = Lru(geometry)
        self._quota = quota
        self._left = 0

    def begin_step(self, *, is_prefill: bool) -> None:
        """Renew the quota; a prefill neither reads nor fills the cache."""
        self._lru.begin_step(is_prefill=is_prefill)
        self._left = 0 if is_prefill else self._quota

    def touch(self, load: LayerLoad) -> None:
        """Stamp every active expert."""
        self._lru.touch(load)

    def candidates(
        self, layer: int, misses: Sequence[int], slot_of: Sequence[int]
    ) -> Sequence[int]:
        """Return the misses that the quota still allows."""
        allowed = max(0, min(len(misses), self._left - 1))
        self._left -= len(misses)
        return misses[:allowed]

    def scores(self, keys: Sequence[int]) -> list[float]:
        """Return the step of the last use."""
        return self._lru.scores(keys)

"""Pairs experts that enter a set of slots with experts that leave it, for every eviction policy."""

from collections.abc import Container, Iterator, Sequence

from tandem.policy.eviction.policy import Eviction
from tandem.policy.residency import NOWHERE, READY, Residency


class Admission:
    """Chooses, for each expert that enters a set of slots, which one leaves; the caller evicts."""

    def __init__(self, residency: Residency, eviction: Eviction) -> None:
        """Store `residency`, which knows the slots, and `eviction`, which scores experts."""
        self._residency = residency
        self._eviction = eviction

    def pairs(
        self, set_id: int, entering: Sequence[int], in_use: Container[int], *, asks: bool = True
    ) -> Iterator[tuple[int, int]]:
        """Yield (newcomer, victim) keys in the order of `entering`; NOWHERE stands for a free slot.

        Ends early if no victim is left. With `asks`, it also ends once the eviction policy refuses
        a newcomer. An expert that is in `in_use` or being copied is never a victim. The caller must
        apply each pair before it requests the next pair.
        """
        residency, eviction = self._residency, self._eviction
        free = residency.free[set_id]
        place = 0
        while place < len(entering) and free:
            yield entering[place], NOWHERE
            place += 1
        if place == len(entering):
            return
        state = residency.state
        members = residency.members[set_id]
        evictable = [key for key in members if state[key] == READY and key not in in_use]
        if not evictable:
            return
        scores = eviction.scores(evictable)
        newcomers = eviction.scores(entering[place:]) if asks else [0.0] * len(entering[place:])
        if asks and len(newcomers) == 1:
            least = min(scores)
            ranked = [(least, evictable[scores.index(least)])]
        else:
            ranked = sorted(zip(scores, evictable, strict=True))
        for key, newcomer, (victim_score, victim) in zip(
            entering[place:], newcomers, ranked, strict=False
        ):
            if asks and not eviction.admits(newcomer, victim_score):
                return
            yield key, victim

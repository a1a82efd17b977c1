"""The ring: slots in which experts take turns that are fetched for one use.

One slot is the ring's own. The others belong to the expert cache: a set lends one when a fetch asks
for it, and has it back after some steps without a fetch.
"""

from collections.abc import Container, Iterator, Sequence
from itertools import cycle

from tandem.policy.admission import Admission
from tandem.policy.eviction.policy import Eviction
from tandem.policy.residency import NOWHERE, Residency

OWN_SLOTS = 1
QUIET_STEPS = 16  # without a fetch, until slots are given back


class Ring:
    """Borrows slots of the cache while experts are fetched."""

    def __init__(
        self, residency: Residency, eviction: Eviction, own: Sequence[int], size: int
    ) -> None:
        """Start with the `own` slots; `size` counts them and those that may be borrowed."""
        self.size = size
        self._residency, self._own = residency, own
        self._admission = Admission(residency, eviction)
        self._quiet_steps = 0

    def begin_step(self, *, in_graph: bool = False) -> None:
        """Give the cache its slots back: if nothing was fetched for some steps, or in one graph."""
        self._quiet_steps += 1
        if in_graph or self._quiet_steps > QUIET_STEPS:
            self._residency.take_back()

    def slots(self, in_use: Container[int]) -> Iterator[tuple[int, int]]:
        """Yield slots for fetched experts to take turns in, each with the key that leaves it.

        Keys `in_use` stay. Where none leaves it is NOWHERE.
        """
        self._quiet_steps = 0
        lent = self._residency.lent
        yield from ((slot, NOWHERE) for slot in (*self._own, *lent))
        while len(self._own) + len(lent) < self.size and (borrowed := self._borrow(in_use)):
            yield borrowed
        yield from cycle([(slot, NOWHERE) for slot in (*self._own, *lent)])

    def _borrow(self, in_use: Container[int]) -> tuple[int, int] | None:
        """Take a slot from the largest set that has one to give; returns it and who left it."""
        residency = self._residency
        for set_id in sorted(
            range(residency.num_sets), key=lambda at: (-residency.capacity[at], -at)
        ):
            for _, victim in self._admission.pairs(set_id, (NOWHERE,), in_use, asks=False):
                if victim != NOWHERE:
                    residency.remove(victim)
                return residency.lend(set_id), victim
        return None

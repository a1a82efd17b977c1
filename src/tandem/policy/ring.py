"""The ring: slots for experts that are fetched for a single use.

One slot is the ring's own. The others belong to the expert cache: a set lends a slot when a fetch
needs it, and gets the slot back after some steps without a fetch.
"""

from collections.abc import Container, Iterator, Sequence
from itertools import cycle

from tandem.policy.admission import Admission
from tandem.policy.eviction.policy import Eviction
from tandem.policy.residency import NOWHERE, Residency

OWN_SLOTS = 1
QUIET_STEPS = 16  # steps without a fetch until slots are given back


class Ring:
    """Borrows slots of the cache while experts are fetched."""

    def __init__(
        self,
        residency: Residency,
        eviction: Eviction,
        own: Sequence[int],
        size: int,
        graph_size: int = 0,
    ) -> None:
        """Start with the `own` slots; `size` is the most slots, own and borrowed together.

        `graph_size` is the most slots in steps in one graph, where no slot is used twice in a
        layer.
        """
        self.size, self.graph_size = size, graph_size
        self._residency, self._own = residency, own
        self._admission = Admission(residency, eviction)
        self._quiet_steps = self._graph_steps = 0
        # Most slots that a layer in one graph needed: lately, and in the steps before.
        self._needed = 0, 0

    def begin_step(self, *, in_graph: bool = False, may_fetch: bool = True) -> list[int]:
        """Borrow the slots that a step may need; return the keys of the experts that leave them.

        Only a step in one graph borrows slots now: as many as any layer of recent steps needed.
        Borrowed slots return to the cache if the step may not fetch, or if no recent step has
        fetched.
        """
        self._quiet_steps += 1
        if not may_fetch or self._quiet_steps > QUIET_STEPS:
            self._residency.take_back()
        if not in_graph or not may_fetch:
            return []
        self._graph_steps += 1
        if self._graph_steps % QUIET_STEPS == 0:
            self._needed = 0, self._needed[0]
            self._residency.take_back()
        target, left = min(max(self._needed), self.graph_size), []
        while self._num_slots < target and (borrowed := self._borrow(())):
            left.append(borrowed[1])
        return [key for key in left if key != NOWHERE]

    @property
    def _num_slots(self) -> int:
        return len(self._own) + len(self._residency.lent)

    def slots(self, in_use: Container[int]) -> Iterator[tuple[int, int]]:
        """Yield (slot, key of the expert that leaves it) for one fetched expert after another.

        The key is NOWHERE if no expert leaves. Experts whose keys are `in_use` do not leave. Once
        the ring has `size` slots, or no set can lend another slot, the ring's slots are yielded
        again in turn.
        """
        self._quiet_steps = 0
        lent = self._residency.lent
        yield from ((slot, NOWHERE) for slot in (*self._own, *lent))
        while self._num_slots < self.size and (borrowed := self._borrow(in_use)):
            yield borrowed
        yield from cycle([(slot, NOWHERE) for slot in (*self._own, *lent)])

    def graph_slots(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield (slot, NOWHERE) for up to `count` experts of a layer in one graph.

        NOWHERE means that no expert leaves the slot. No slot is yielded twice, because all fetched
        experts are needed at the same time; so there may be fewer slots than `count`.
        """
        self.note_needed(count)
        return iter([(slot, NOWHERE) for slot in self.held_slots()[:count]])

    def note_needed(self, count: int) -> None:
        """Record how many slots a layer in one graph would have used.

        Later steps in one graph borrow as many.
        """
        self._quiet_steps = 0
        self._needed = max(self._needed[0], count), self._needed[1]

    def held_slots(self) -> list[int]:
        """Return the ring's own slots and the borrowed slots."""
        return [*self._own, *self._residency.lent]

    def _borrow(self, in_use: Container[int]) -> tuple[int, int] | None:
        """Borrow a slot from the largest set that can lend one; None if no set can.

        Returns (slot, key of the evicted expert); the key is NOWHERE if the slot was free.
        """
        residency = self._residency
        for set_id in sorted(
            range(residency.num_sets), key=lambda at: (-residency.capacity[at], -at)
        ):
            for _, victim in self._admission.pairs(set_id, (NOWHERE,), in_use, asks=False):
                if victim != NOWHERE:
                    residency.remove(victim)
                return residency.lend(set_id), victim
        return None

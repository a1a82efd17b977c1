"""Chooses which experts of a coming layer to prefetch and which to evict: the plain reference.

In planned steps, copies use idle link time and cache slots: first free slots, then the slots of
residents that are less likely to be used. In a step in one graph no expert can be evicted for a
copy, because the device has already looked up residents: copies go into free staging slots.

The experts that a layer routed by token id will use are known before a step begins. Those with the
most tokens are copied first. In planned steps they replace residents that the layer will not use,
or go into staging slots if the cache has any.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tandem.policy.admission import Admission
from tandem.policy.cost import CostTable
from tandem.policy.eviction.policy import Eviction
from tandem.policy.link_queue import LinkQueue
from tandem.policy.plan import LayerLoad
from tandem.policy.prediction.policy import Prediction
from tandem.policy.prefetch import PrefetchChoice, PrefetchTerms, Recurrence
from tandem.policy.residency import NOWHERE, Residency


class Coming(NamedTuple):
    """A coming layer, and the time in which the link can copy experts for it."""

    layer: int
    begin: float  # when the link is free for the layer's copies
    needed_at: float  # when the layer is planned, or published in a graph
    in_graph: bool  # only into clear slots, and only if in time
    in_use: frozenset[int]  # keys in use by the current layer


class Ahead:
    """Chooses experts to prefetch, for any combination of policies; the caller copies them."""

    def __init__(
        self,
        costs: CostTable,
        residency: Residency,
        link: LinkQueue,
        eviction: Eviction,
        prediction: Prediction,
        prefetch: PrefetchChoice,
        copy_price_seconds: float,
    ) -> None:
        """Store a planner's components; `copy_price_seconds` is what a copy costs CPU and GPU."""
        self._costs, self._residency, self._link = costs, residency, link
        self.prediction, self.prefetch, self.price = prediction, prefetch, copy_price_seconds
        self._admission = Admission(residency, eviction)

    def predicted(self, coming: Coming, chances: Recurrence) -> Iterator[tuple[int, int]]:
        """Yield (entering, leaving) keys for prefetches by prediction; see `Decider.predicted`."""
        residency, link, prefetch = self._residency, self._link, self.prefetch
        idle = self._copies_in_time(coming)
        if idle <= 0 and (coming.in_graph or not prefetch.is_staged):
            return
        is_staged = coming.in_graph or prefetch.is_staged
        set_id = residency.staging if is_staged else residency.set_of(coming.layer)
        room = len(residency.free[set_id]) if is_staged else residency.capacity[set_id]
        if room == 0 or (forecast := self.prediction.predict(coming.layer)) is None:
            return
        experts = residency.geometry.num_experts
        first = coming.layer * experts
        terms = self._terms(first, room, idle)
        keys = [first + expert for expert in prefetch.choose(forecast, terms)]
        if coming.in_graph:  # skip those fetched late for one use
            yield from ((key, NOWHERE) for key in keys if key not in link.pending)
            return
        for key, victim in self._admission.pairs(set_id, keys, coming.in_use, asks=False):
            if victim != NOWHERE:
                if victim // experts != coming.layer:
                    continue  # the forecast says nothing about other layers
                if not prefetch.replaces(forecast, terms, key - first, victim - first):
                    continue
            if is_staged or chances.note_chance():
                yield key, victim

    def known(self, load: LayerLoad, coming: Coming) -> tuple[int, Iterable[tuple[int, int]]]:
        """Return how many experts are worth a copy, and the copies to start (`Decider.known`)."""
        misses = self._misses(load)
        return len(misses), self._in_time(load, misses, coming)

    def _misses(self, load: LayerLoad) -> list[tuple[int, float]]:
        """Return (key, CPU seconds) of the load's absent experts, those with the most tokens first.

        Experts with a pending copy are left out, and experts that the CPU computes in no more time
        than the price of a copy.
        """
        cpu, slot_of, pending = self._costs.cpu, self._residency.slot_of, self._link.pending
        misses = list[tuple[int, float]]()
        by_tokens = sorted(zip(load.experts, load.tokens, strict=True), key=lambda each: -each[1])
        for expert, tokens in by_tokens:
            key = self._residency.geometry.key(load.layer, expert)
            if slot_of[key] != NOWHERE or key in pending:  # e.g. fetched late for one use
                continue
            if cpu[tokens] <= self.price:
                break
            misses.append((key, cpu[tokens]))
        return misses

    def _in_time(
        self, load: LayerLoad, misses: Sequence[tuple[int, float]], coming: Coming
    ) -> Iterator[tuple[int, int]]:
        """Yield (key, victim) for the copies of `misses` that arrive in time and find a slot.

        In planned steps, a copy may also end after the layer is planned, if it begins before that
        time and is late by less than the CPU's time for the expert.
        """
        link_seconds, begin = self._link.copy_seconds, coming.begin
        most = self._link.whole_copies(coming.needed_at - begin)
        places = self._places(load, [key for key, _ in misses], coming)
        for count, ((key, cpu_seconds), victim) in enumerate(zip(misses, places, strict=False)):
            if coming.in_graph:
                if count >= most:
                    return
            elif (
                begin >= coming.needed_at or begin + link_seconds - coming.needed_at >= cpu_seconds
            ):
                return
            yield key, victim
            begin += link_seconds

    def _places(self, load: LayerLoad, keys: Sequence[int], coming: Coming) -> Iterator[int]:
        """Yield where copies of `keys` go, in order: the key to evict, or NOWHERE for a free slot.

        If the cache has staging slots, as always in a graph, NOWHERE is yielded once for each free
        staging slot. Otherwise only experts of `load.layer` are evicted, and none that the load or
        `coming.in_use` needs. There may be fewer places than keys.
        """
        residency = self._residency
        if coming.in_graph or residency.capacity[residency.staging]:
            yield from [NOWHERE] * len(residency.free[residency.staging])
            return
        geometry, set_id = residency.geometry, residency.set_of(load.layer)
        stay = coming.in_use | {geometry.key(load.layer, expert) for expert in load.experts}
        for _, victim in self._admission.pairs(set_id, keys, stay, asks=False):
            if victim == NOWHERE or victim // geometry.num_experts == load.layer:
                yield victim

    def _copies_in_time(self, coming: Coming) -> int:
        """Return how many prefetches for a layer the link can carry while it is idle.

        In planned steps without staging slots, a single copy is allowed even if it ends after the
        layer is planned. Conditions: no whole copy fits, the layer has a hint, and the copy is late
        by less than the CPU's time for the expert. Without the prefetch, the layer would fetch the
        expert later still.
        """
        idle_seconds = coming.needed_at - coming.begin
        copy_seconds, count = self._link.copy_seconds, self._link.whole_copies(idle_seconds)
        if count or coming.in_graph or self.prefetch.is_staged or idle_seconds <= 0.0:
            return count
        is_sooner = copy_seconds - idle_seconds < self._costs.cpu[1]
        return int(is_sooner and self.prediction.is_hinted(coming.layer))

    def _terms(self, first: int, room: int, idle_copies: int) -> PrefetchTerms:
        """Return the `PrefetchTerms` of the layer whose first expert has the key `first`."""
        slots = self._residency.slot_of[first : first + self._residency.geometry.num_experts]
        gain, link_seconds = self._costs.cpu[1], self._link.copy_seconds
        return PrefetchTerms(slots, room, idle_copies, link_seconds, self.price, gain)

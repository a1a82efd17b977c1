"""Prefetches experts for coming layers: the decider chooses them, and this module queues them.

In planned steps, the next layer's experts are copied first; a later layer with a known load follows
once no nearer layer has experts left to copy. In a step in one graph, prefetches are copied before
this layer's missed experts that were admitted to the cache: an admitted expert helps only later
steps, but a prefetch saves the next layer a miss in this step.
"""

from collections.abc import Iterable, Sequence

from tandem.policy.ahead import Coming
from tandem.policy.cost import CostTable
from tandem.policy.decider import Decider
from tandem.policy.link_queue import LinkQueue
from tandem.policy.plan import Copy, LayerLoad
from tandem.policy.prefetch import PrefetchChoice, Recurrence
from tandem.policy.residency import NOWHERE, Residency


class CopiesAhead:
    """Queues the prefetches for a step's layers, and holds the step's known loads."""

    def __init__(
        self,
        costs: CostTable,
        residency: Residency,
        link: LinkQueue,
        decider: Decider,
        prefetch: PrefetchChoice,
        copy_price_seconds: float,
    ) -> None:
        """Store a planner's components; `copy_price_seconds` is what a copy costs CPU and GPU."""
        self._costs, self._residency, self._link = costs, residency, link
        self._decider, self.copy_price_seconds = decider, copy_price_seconds
        self.is_staged, self.most = prefetch.is_staged, prefetch.count
        self.chances = Recurrence()
        self._known: dict[int, LayerLoad] = {}  # layer -> load, in the layers' order

    def begin_step(self, known: Sequence[LayerLoad]) -> None:
        """Set the step's known loads, which must be in the order of the layers."""
        self._known = {load.layer: load for load in known}
        self._costs.require(max((max(load.tokens) for load in known), default=0))

    def knows(self, layer: int) -> bool:
        """Tell whether the step's known loads include that of `layer`."""
        return layer in self._known

    def planned(
        self, layer: int, in_use: frozenset[int], now: float, next_plan: float, *, predicts: bool
    ) -> tuple[Copy, ...]:
        """Queue and return prefetches for `layer` and, by their known loads, for later layers.

        `layer` is planned at `next_plan`. Layers are assumed to follow each other at the interval
        from `now` to `next_plan`. Before that, staged experts of passed layers leave their slots,
        unless they are `in_use`.
        """
        found, link = list[Copy](), self._link
        if predicts and layer not in self._known:
            self.chances.layer_passed()
            set_id = self._residency.set_of(layer)
            if self.is_staged:
                self._residency.release_passed(layer, in_use)
                set_id = self._residency.staging
            coming = Coming(layer, max(link.free_at, now), next_plan, False, in_use)
            for pair in self._decider.predicted(coming, self.chances):
                found.append(self._queued(pair, set_id, now))
        if self._known:
            found += self._of_known(layer, in_use, now, next_plan)
        return tuple(found)

    def in_graph(
        self, layer: int, num_fetches: int, now: float, next_plan: float, *, predicts: bool
    ) -> tuple[Copy, ...]:
        """Assign free staging slots to experts of `layer` and later layers; return the copies.

        `layer` is published at `next_plan`. Later layers are included if their loads are known, and
        are assumed to follow at the interval from `now` to `next_plan`. Only copies that arrive in
        time, behind `num_fetches` fetches, are returned. The caller must pass them to `issue`.
        """
        found, link = list[Copy](), self._link
        ready = max(link.free_at, now + self._costs.copy_wake) + num_fetches * link.copy_seconds

        def coming(of: int, published: float) -> Coming:
            return Coming(of, ready + len(found) * link.copy_seconds, published, True, frozenset())

        for load in self._since(layer):
            published = next_plan + (load.layer - layer) * (next_plan - now)
            _, pairs = self._decider.known(load, coming(load.layer, published))
            found += [self._into_clear(key) for key, _ in pairs]
        num_layers = self._residency.geometry.num_layers
        if predicts and layer < num_layers and layer not in self._known:
            pairs = self._decider.predicted(coming(layer, next_plan), self.chances)
            found += [self._into_clear(key) for key, _ in pairs]
        return tuple(found)

    def issue(self, ahead: Iterable[Copy], now: float) -> None:
        """Queue on the link the prefetches that `in_graph` returned.

        They begin once the copying thread is awake (`copy_wake`).
        """
        for copy in ahead:
            key = self._residency.geometry.key(copy.layer, copy.expert)
            self._link.issue(key, now + self._costs.copy_wake)

    def _of_known(
        self, layer: int, in_use: frozenset[int], now: float, next_plan: float
    ) -> list[Copy]:
        residency, link = self._residency, self._link
        residency.release_passed(layer, in_use)
        is_staged, found = residency.capacity[residency.staging] > 0, list[Copy]()
        for load in self._since(layer):
            needed_at = next_plan + (load.layer - layer) * (next_plan - now)
            coming = Coming(load.layer, max(link.free_at, now), needed_at, False, in_use)
            set_id = residency.staging if is_staged else residency.set_of(load.layer)
            num_chosen, pairs = self._decider.known(load, coming)
            copies = [self._queued(pair, set_id, now) for pair in pairs]
            found += copies
            if len(copies) < num_chosen:
                break
        return found

    def _since(self, layer: int) -> list[LayerLoad]:
        """Return the known loads of `layer` and of later layers, in the layers' order."""
        return [load for load in self._known.values() if load.layer >= layer]

    def _queued(self, pair: tuple[int, int], set_id: int, now: float) -> Copy:
        residency, (key, victim) = self._residency, pair
        if victim != NOWHERE:
            residency.remove(victim)
        slot = residency.insert(key, set_id)
        self._link.issue(key, now)
        return residency.copy_of(key, slot, victim)

    def _into_clear(self, key: int) -> Copy:
        residency = self._residency
        return residency.copy_of(key, residency.insert(key, residency.staging), NOWHERE)

"""Copies ahead of experts that layers which are routed by token will use: no guess.

They are known before a step begins. In a planned step copies go to the nearest such layer first,
and on to a later one once nothing of it is left; into clear staging slots where some are set aside,
else over residents of the layer that it will not use. In a step that is one graph: clear slots.
"""

from collections.abc import Iterator, Sequence

from tandem.policy.admission import Admission
from tandem.policy.cost import CostTable
from tandem.policy.link_queue import LinkQueue
from tandem.policy.plan import Copy, Geometry, LayerLoad
from tandem.policy.residency import NOWHERE, Residency


class KnownCopies:
    """The loads of a step's layers that are known, and what is copied by them."""

    def __init__(
        self,
        geometry: Geometry,
        costs: CostTable,
        residency: Residency,
        link: LinkQueue,
        admission: Admission,
        copy_price_seconds: float,
    ) -> None:
        """Work with a planner's parts; one copy costs CPU and GPU `copy_price_seconds`."""
        self._geometry, self._costs, self._residency = geometry, costs, residency
        self._link, self._admission, self._price = link, admission, copy_price_seconds
        self._loads: dict[int, LayerLoad] = {}  # by layer, in their order

    def begin_step(self, known: Sequence[LayerLoad]) -> None:
        """Take the loads of layers that are known, in the layers' order."""
        self._loads = {load.layer: load for load in known}
        most = max((max(load.tokens) for load in known), default=0)
        self._costs.require(most)

    def __contains__(self, layer: int) -> bool:
        """Tell whether a layer's load is known."""
        return layer in self._loads

    def since(self, layer: int) -> Iterator[LayerLoad]:
        """Yield the loads that are known of a layer and of those behind it."""
        return (load for load in self._loads.values() if load.layer >= layer)

    def planned(
        self, layer: int, in_use: frozenset[int], now: float, next_plan: float
    ) -> tuple[Copy, ...]:
        """Return copies for layers from this one on, which is planned at `next_plan`; queue them.

        Each layer is expected as much later than the one before as this is than `now`. Staged
        experts of layers that have passed and are not `in_use` leave first.
        """
        if not self._loads:
            return ()
        self._residency.release_passed(layer, in_use)
        found: list[Copy] = []
        for load in self.since(layer):
            needed_at = next_plan + (load.layer - layer) * (next_plan - now)
            misses = self._misses(load)
            copies = self._copied(load, misses, in_use, now, needed_at)
            found += copies
            if len(copies) < len(misses):
                break
        return tuple(found)

    def in_graph(self, load: LayerLoad, ready: float, published: float) -> list[Copy]:
        """Give clear slots to a layer's misses, as many as come from `ready` until `published`."""
        residency = self._residency
        idle = self._link.whole_copies(published - ready)
        most = max(0, min(len(residency.free[residency.staging]), idle))
        return [
            residency.copy_of(key, residency.insert(key, residency.staging), NOWHERE)
            for key, _ in self._misses(load)[:most]
        ]

    def _misses(self, load: LayerLoad) -> list[tuple[int, float]]:
        """Return a layer's absent experts, those of most tokens first: (key, CPU seconds).

        None that a copy would cost more than the CPU.
        """
        cpu, slot_of, pending = self._costs.cpu, self._residency.slot_of, self._link.pending
        misses = list[tuple[int, float]]()
        by_tokens = sorted(zip(load.experts, load.tokens, strict=True), key=lambda each: -each[1])
        for expert, tokens in by_tokens:
            key = self._geometry.key(load.layer, expert)
            if slot_of[key] != NOWHERE or key in pending:  # it may be fetched for one use, late
                continue
            if cpu[tokens] <= self._price:
                break
            misses.append((key, cpu[tokens]))
        return misses

    def _copied(
        self,
        load: LayerLoad,
        misses: Sequence[tuple[int, float]],
        in_use: frozenset[int],
        now: float,
        needed_at: float,
    ) -> list[Copy]:
        """Copy as many misses as the link begins in time, and ends sooner than the CPU would."""
        residency, link, copies = self._residency, self._link, list[Copy]()
        places = self._places(load, [key for key, _ in misses], in_use)
        for (key, cpu_seconds), (set_id, victim) in zip(misses, places, strict=False):
            begin = max(link.free_at, now)
            if begin >= needed_at or begin + link.copy_seconds - needed_at >= cpu_seconds:
                break
            if victim != NOWHERE:
                residency.remove(victim)
            slot = residency.insert(key, set_id)
            link.issue(key, now)
            copies.append(residency.copy_of(key, slot, victim))
        return copies

    def _places(
        self, load: LayerLoad, keys: Sequence[int], in_use: frozenset[int]
    ) -> Iterator[tuple[int, int]]:
        """Yield for each key the set that takes it, and who leaves for it; may end sooner."""
        residency, experts = self._residency, self._geometry.num_experts
        if residency.capacity[residency.staging]:
            yield from [(residency.staging, NOWHERE)] * len(residency.free[residency.staging])
            return
        set_id = residency.set_of(load.layer)
        stay = in_use | {self._geometry.key(load.layer, expert) for expert in load.experts}
        for _, victim in self._admission.pairs(set_id, keys, stay, asks=False):
            if victim == NOWHERE or victim // experts == load.layer:
                yield set_id, victim

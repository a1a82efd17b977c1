"""Hit rates of cache policies alone, without prefetches and with a link that costs nothing.

Every token is one decode step (prompts too), sequences run side by side, and every admitted miss is
ready at the next step. A hit is an active expert that is resident when its layer is reached. The
hit rates compare policies with Belady's bound at equal sets and slots.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tandem.policy.admission import Admission
from tandem.policy.eviction import Eviction
from tandem.policy.plan import Geometry, LayerLoad
from tandem.policy.residency import NOWHERE, Residency
from tandem.sim.steps import LoadReader, replay_steps
from tandem.trace import RoutingTrace

NEVER = 1 << 60


# Called for dumps with a layer's load, its hits, its (newcomer, victim or -1) keys and their rule.
Demand = Callable[[LayerLoad, Sequence[int], list[tuple[int, int]], str], None]


def demand_loads(trace: RoutingTrace, batch: int, limit: int) -> Iterator[list[LayerLoad]]:
    """Yield each step's loads until `limit` tokens have run; every token is a decode step."""
    reader = LoadReader(trace)
    tokens = 0
    for step in replay_steps(trace, batch, prompt=0):
        yield reader.loads(step)
        tokens += len(step.tokens)
        if tokens >= limit:
            return


class DemandCache:
    """A cache under an eviction policy; admitted misses are in it once their layer has run."""

    def __init__(
        self,
        geometry: Geometry,
        set_sizes: Sequence[int],
        eviction: Eviction,
        ranking: Eviction | None = None,
    ) -> None:
        """Start empty; with a `ranking`, that policy's scores decide, while `eviction` learns."""
        self._num_experts = geometry.num_experts
        self._residency = Residency(geometry, set_sizes, 0)
        self._admission = Admission(self._residency, ranking or eviction)
        self._eviction = eviction
        eviction.resized(set_sizes)

    def begin_step(self, *, is_prefill: bool = False) -> None:
        """Tell the eviction policy that a step begins."""
        self._eviction.begin_step(is_prefill=is_prefill)

    def use(self, load: LayerLoad) -> tuple[list[int], list[tuple[int, int]]]:
        """Use a layer's active experts and offer slots to absent ones.

        Returns the absent experts, and the changes as (newcomer, victim) keys; victim is NOWHERE
        for a free slot.
        """
        self._eviction.touch(load)
        first = load.layer * self._num_experts
        slot_of = self._residency.slot_of
        absent = [expert for expert in load.experts if slot_of[first + expert] == NOWHERE]
        return absent, self.admit(load, [first + expert for expert in absent])

    def has(self, layer: int, expert: int) -> bool:
        """Tell whether an expert is in the cache."""
        return self._residency.slot_of[layer * self._num_experts + expert] != NOWHERE

    def admit(self, load: LayerLoad, absent: Sequence[int]) -> list[tuple[int, int]]:
        """Give slots to the `absent` keys of the load's layer that the policy admits.

        Returns the changes as (newcomer, victim) keys; victim is NOWHERE for a free slot.
        """
        residency, eviction = self._residency, self._eviction
        newcomers = eviction.candidates(load.layer, absent, residency.slot_of)
        if not newcomers:
            return []
        set_id, first = residency.set_of(load.layer), load.layer * self._num_experts
        in_use = {first + expert for expert in load.experts}
        changes = []
        for key, victim in self._admission.pairs(set_id, newcomers, in_use):
            if victim != NOWHERE:
                residency.remove(victim)
            residency.insert(key, set_id)
            eviction.inserted(key)
            changes.append((key, victim))
        for key, _ in changes:
            residency.finish(key)
        return changes


def hit_rate(
    steps: Iterator[list[LayerLoad]],
    geometry: Geometry,
    set_sizes: Sequence[int],
    eviction: Eviction,
    watch: Demand | None = None,
) -> float:
    """Return the share of active experts that are resident under an eviction policy.

    `watch` is called for each layer of each step.
    """
    cache = DemandCache(geometry, set_sizes, eviction)
    hits = demands = 0
    for loads in steps:
        cache.begin_step()
        for load in loads:
            absent, changes = cache.use(load)
            hits += len(load.experts) - len(absent)
            demands += len(load.experts)
            if watch is not None:
                held = [expert for expert in load.experts if expert not in absent]
                watch(load, held, changes, eviction.rule(load.layer))
    return hits / demands if demands else 0.0


def belady_hit_rate(
    steps: Iterator[list[LayerLoad]], geometry: Geometry, set_sizes: Sequence[int]
) -> float:
    """Return the hit rate of Belady's policy with bypass, an upper bound for demand-filled caches.

    After each layer, its set keeps, of residents and active experts, the experts whose next use is
    nearest; a miss whose own next use is farthest never enters.
    """
    width = geometry.num_experts
    order = [[[load.layer * width + e for e in load.experts] for load in loads] for loads in steps]
    next_uses = _next_uses(order, geometry)
    layer_sets = len(set_sizes) > 1
    coming: list[int] = [NEVER] * (geometry.num_layers * geometry.num_experts)
    resident = bytearray(len(coming))
    held = [0] * len(set_sizes)
    farthest: list[list[tuple[int, int]]] = [[] for _ in set_sizes]
    hits = demands = 0
    for layers, uses in zip(order, next_uses, strict=True):
        for layer, (keys, next_use) in enumerate(zip(layers, uses, strict=True)):
            set_id = layer if layer_sets else 0
            heap = farthest[set_id]
            demands += len(keys)
            for key, use in zip(keys, next_use, strict=True):
                if resident[key]:
                    hits += 1
                else:
                    resident[key] = 1
                    held[set_id] += 1
                coming[key] = use
                heapq.heappush(heap, (-use, key))
            while held[set_id] > set_sizes[set_id]:
                use, key = heapq.heappop(heap)
                if resident[key] and coming[key] == -use:
                    resident[key] = 0
                    held[set_id] -= 1
    return hits / demands if demands else 0.0


def _next_uses(order: Sequence[list[list[int]]], geometry: Geometry) -> list[list[list[int]]]:
    """Return for each use of a key when the key is used next: step * number of layers + layer.

    The result has the form of `order`: keys by step and layer. NEVER: the key is not used again.
    """
    upcoming: npt.NDArray[np.int64] = np.full(geometry.num_layers * geometry.num_experts, NEVER)
    result: list[list[list[int]]] = []
    for number in range(len(order) - 1, -1, -1):
        layers = order[number]
        keys = np.fromiter((key for row in layers for key in row), dtype=np.int64)
        uses = upcoming[keys].tolist()
        upcoming[keys] = number * geometry.num_layers + keys // geometry.num_experts
        start, rows = 0, []
        for row in layers:
            rows.append(uses[start : start + len(row)])
            start += len(row)
        result.append(rows)
    result.reverse()
    return result

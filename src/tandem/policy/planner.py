"""The planner: one layer's load in, one layer's plan out. The engine and the simulator drive it.

Per step: `begin_step`, then `plan` for each MoE layer in order, each as soon as the layer's router
has run; `copy_finished` whenever a copy of a plan has ended. The executor keeps this order: the
link serves copies as planned, one at a time; a slot is overwritten only after the last planned use
of its old content; an `arriving` or fetched expert runs after its own copy.

Deterministic: equal calls give equal plans. Reads no clock; all times are arguments.
"""

from collections.abc import Sequence
from itertools import cycle

from tandem.core.ids import ExpertId
from tandem.policy.admission import Admission
from tandem.policy.assignment.problem import Assignment, LayerProblem, Split, all_on_cpu
from tandem.policy.cost import CostTable
from tandem.policy.eviction.policy import Eviction
from tandem.policy.link_queue import LinkQueue
from tandem.policy.plan import Copy, Geometry, Hint, LayerLoad, LayerPlan
from tandem.policy.prediction.policy import Prediction
from tandem.policy.prefetch.policy import PrefetchChoice, PrefetchTerms
from tandem.policy.residency import COPYING, NOWHERE, READY, Residency

UNLIMITED = 1 << 30


class Planner:
    """Decides with four policies what a layer's experts run on and what the link carries."""

    def __init__(
        self,
        geometry: Geometry,
        costs: CostTable,
        residency: Residency,
        *,
        assignment: Assignment,
        eviction: Eviction,
        prediction: Prediction,
        prefetch: PrefetchChoice,
        ring_slots: Sequence[int],
        max_fetches: int = UNLIMITED,
        never_worse_than_cpu: bool = True,
        can_prefetch: bool = False,
        copy_price_seconds: float = 0.0,
    ) -> None:
        """Wire the policies together.

        `ring_slots` take fetched experts that are not admitted to the cache, in turn; without any,
        only admitted experts can be fetched. `max_fetches` is equation 9 for one layer.
        `copy_price_seconds` is what one copy costs the other lanes.
        """
        self.geometry = geometry
        self.costs = costs
        self.residency = residency
        self.link = LinkQueue(costs.link)
        self._assignment = assignment
        self._eviction = eviction
        self._prediction = prediction
        self._prefetch = prefetch
        self._admission = Admission(residency, eviction)
        self._ring = tuple(ring_slots)
        self._max_fetches = max_fetches if self._ring else 0
        self._never_worse_than_cpu = never_worse_than_cpu
        self._copy_price = copy_price_seconds
        self._can_prefetch = can_prefetch
        self._step_tokens = 1
        self._dense_seconds = costs.dense(1)
        self._resident_splits: dict[int, Split] = {}

    def begin_step(
        self,
        num_tokens: int,
        now: float,
        *,
        token_ids: Sequence[int] = (),
        is_prefill: bool = False,
    ) -> tuple[Copy, ...]:
        """Start a step of `num_tokens` tokens; returns copies ahead for its first layer."""
        self._eviction.begin_step(is_prefill=is_prefill)
        if num_tokens != self._step_tokens:
            self._step_tokens = num_tokens
            self._dense_seconds = self.costs.dense(num_tokens)
        if not self._can_prefetch:
            return ()
        self._prediction.begin_step(token_ids)
        return self._copies_ahead(0, frozenset(), now, now + self._dense_seconds)

    def copy_finished(self, layer: int, expert: int, now: float) -> None:
        """Note that a planned copy has ended at `now`."""
        key = layer * self.geometry.num_experts + expert
        self.link.finish(key, now)
        if self.residency.state[key] == COPYING:
            self.residency.finish(key)

    def plan(self, load: LayerLoad, now: float, hints: Sequence[Hint] = ()) -> LayerPlan:
        """Decide for one layer at time `now`; its copies count as issued in the plan's order."""
        layer, residency = load.layer, self.residency
        first = layer * self.geometry.num_experts
        keys = [first + expert for expert in load.experts]
        if max(load.tokens) >= len(self.costs.cpu):
            self.costs.grow(2 * max(load.tokens))
        self._eviction.touch(load)
        if self._can_prefetch:
            for hint in hints:
                self._prediction.hint(hint)
            self._prediction.observe(load)
        state = residency.state
        states = bytes([state[key] for key in keys])
        if states.count(READY) == len(keys):
            misses: list[int] = []
            split = self._split_resident(load, states, now)
        else:
            misses = [key for key, held in zip(keys, states, strict=True) if not held]
            split = self._split(self._problem(load, keys, states, now))
        fetch, insert = self._place(layer, keys, misses, split, now)
        next_plan = now + split.seconds + self._dense_seconds
        ahead: tuple[Copy, ...] = ()
        if self._can_prefetch and layer + 1 < self.geometry.num_layers:
            ahead = self._copies_ahead(layer + 1, frozenset(keys), now, next_plan)
        gpu, arriving, cpu = self._lanes(load, states, split)
        return LayerPlan(
            layer, gpu, arriving, fetch, cpu, insert, ahead, split.gpu_seconds, split.cpu_seconds
        )

    def problem(self, load: LayerLoad, now: float) -> LayerProblem:
        """Return a layer's assignment problem as it stands now; changes nothing."""
        first = load.layer * self.geometry.num_experts
        keys = [first + expert for expert in load.experts]
        state = self.residency.state
        return self._problem(load, keys, bytes([state[key] for key in keys]), now)

    def _problem(
        self, load: LayerLoad, keys: Sequence[int], states: bytes, now: float
    ) -> LayerProblem:
        costs, tokens, link = self.costs, load.tokens, self.link
        cpu_table, gpu_table = costs.cpu, costs.gpu
        wait = [0.0 if held else -1.0 for held in states]
        if COPYING in states:
            for i, held in enumerate(states):
                if held == COPYING:
                    wait[i] = link.remaining_seconds(keys[i], now)
        return LayerProblem(
            load.layer,
            load.experts,
            tokens,
            [cpu_table[n] for n in tokens],
            [gpu_table[n] for n in tokens],
            wait,
            self._eviction.worth(keys),
            costs.cpu_first,
            costs.link,
            link.busy_seconds(now),
            self._max_fetches,
        )

    def _split(self, problem: LayerProblem) -> Split:
        split = self._assignment.assign(problem)
        if self._never_worse_than_cpu:
            surcharge = problem.cpu_first if self._assignment.pipelined else 0.0
            if sum(problem.cpu) + surcharge < split.seconds:
                return all_on_cpu(problem, pipelined=self._assignment.pipelined)
        return split

    def _split_resident(self, load: LayerLoad, states: bytes, now: float) -> Split:
        """Split a layer without misses; with one token each, only their number matters."""
        count = len(states)
        if max(load.tokens) == 1 and count in self._resident_splits:
            known = self._resident_splits[count]
            return known._replace(spill=load.experts[count - len(known.spill) :])
        first = load.layer * self.geometry.num_experts
        keys = [first + expert for expert in load.experts]
        split = self._split(self._problem(load, keys, states, now))
        if max(load.tokens) == 1:
            self._resident_splits[count] = split
            split = split._replace(spill=load.experts[count - len(split.spill) :])
        return split

    def _place(
        self,
        layer: int,
        keys: Sequence[int],
        misses: Sequence[int],
        split: Split,
        now: float,
    ) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
        """Give slots to fetched and to admitted experts; returns (fetch, insert) copies."""
        residency, link = self.residency, self.link
        first = layer * self.geometry.num_experts
        fetched = [first + expert for expert in split.fetch]
        staged = self._staged(keys)
        wanted = self._eviction.candidates(layer, [*misses, *staged], residency.slot_of)
        if not fetched and not wanted:
            return (), ()
        if wanted:
            wanted = self._affordable(wanted, fetched, split, now)
        set_id = residency.set_of(layer)
        copies: dict[int, Copy] = {}
        for key, victim in self._admission.pairs(set_id, wanted, set(keys)):
            evicts = None
            if victim != NOWHERE:
                evicts = self.geometry.expert_id(victim)
                residency.remove(victim)
            if residency.slot_of[key] != NOWHERE:
                residency.adopt(key, set_id)
            else:
                slot = residency.insert(key, set_id)
                copies[key] = Copy(layer, key - first, slot, evicts)
            self._eviction.inserted(key)
        fetch = []
        ring = cycle(self._ring)
        for key in fetched:
            link.issue(key, now)
            admitted = copies.pop(key, None)
            fetch.append(admitted or Copy(layer, key - first, next(ring), None))
        for key in copies:
            link.issue(key, now)
        return tuple(fetch), tuple(copies.values())

    def _staged(self, keys: Sequence[int]) -> list[int]:
        """Return the active experts that were copied ahead."""
        residency = self.residency
        staged = residency.members[residency.staging]
        return [key for key in staged if key in keys] if staged else []

    def _affordable(
        self, wanted: Sequence[int], fetched: Sequence[int], split: Split, now: float
    ) -> Sequence[int]:
        """Drop newcomers that nobody fetches now and that the link has no time for."""
        background = self._eviction.background
        if background == "always":
            return wanted
        room = self._idle_copies(split, now) - len(fetched) if background == "idle" else 0
        slot_of = self.residency.slot_of
        kept = []
        for key in wanted:
            if slot_of[key] == NOWHERE and key not in fetched:
                if room <= 0:
                    continue
                room -= 1
            kept.append(key)
        return kept

    def _idle_copies(self, split: Split, now: float) -> int:
        """Return how many copies end before the next layer; one if the link has nothing to do."""
        busy, copy_seconds = self.link.busy_seconds(now), self.link.copy_seconds
        if copy_seconds == 0.0:
            return UNLIMITED
        idle = split.seconds + self._dense_seconds - busy
        return max(int(idle / copy_seconds), busy == 0.0)

    def _copies_ahead(
        self, layer: int, in_use: frozenset[int], now: float, next_plan: float
    ) -> tuple[Copy, ...]:
        """Copy experts that a layer to come is expected to want."""
        forecast = self._prediction.predict(layer)
        if forecast is None:
            return ()
        residency, link, experts = self.residency, self.link, self.geometry.num_experts
        first, set_id = layer * experts, residency.set_of(layer)
        if self._prefetch.is_staged:
            self._release_stale(layer, in_use)
            set_id = residency.staging
        free = residency.free[set_id]
        idle = next_plan - max(link.free_at, now)
        terms = PrefetchTerms(
            residency.slot_of[first : first + experts],
            len(free) if self._prefetch.is_staged else residency.capacity[set_id],
            int(idle / link.copy_seconds) if link.copy_seconds else UNLIMITED,
            link.copy_seconds,
            self._copy_price,
            self.costs.cpu[1],
        )
        wanted = [first + expert for expert in self._prefetch.choose(forecast, terms)]
        copies = []
        for key, victim in self._admission.least_pairs(set_id, wanted, in_use):
            evicts = None
            if victim != NOWHERE:
                if not self._prefetch.replaces(forecast, terms, key - first, victim - first):
                    continue
                evicts = self.geometry.expert_id(victim)
                residency.remove(victim)
            slot = residency.insert(key, set_id)
            link.issue(key, now)
            copies.append(Copy(layer, key - first, slot, evicts))
        return tuple(copies)

    def _release_stale(self, layer: int, in_use: frozenset[int]) -> None:
        """Free staging slots whose experts' layers have passed."""
        residency, experts = self.residency, self.geometry.num_experts
        for key in [*residency.members[residency.staging]]:
            passed = key // experts != layer and key not in in_use
            if passed and residency.state[key] == READY:
                residency.remove(key)

    def _lanes(
        self, load: LayerLoad, states: bytes, split: Split
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return (gpu, arriving, cpu) experts of a split."""
        experts = load.experts
        if not split.spill and states.count(READY) == len(experts):
            return experts, (), ()
        gpu, arriving, cpu = [], [], []
        for expert, held in zip(experts, states, strict=True):
            if expert in split.spill:
                cpu.append(expert)
            elif held == READY:
                gpu.append(expert)
            elif held == COPYING:
                arriving.append(expert)
            elif expert not in split.fetch:
                cpu.append(expert)
        return tuple(gpu), tuple(arriving), tuple(cpu)


def check_plan(load: LayerLoad, plan: LayerPlan) -> None:
    """Raise AssertionError unless the plan runs every active expert of the load exactly once."""
    runs = [*plan.gpu, *plan.arriving, *(copy.expert for copy in plan.fetch), *plan.cpu]
    assert sorted(runs) == list(load.experts), f"plan runs {sorted(runs)} of {load.experts}"
    evicted = {copy.evicts for copy in (*plan.fetch, *plan.insert, *plan.prefetch)}
    used = {ExpertId(load.layer, expert) for expert in load.experts}
    assert not evicted & used, f"plan evicts {evicted & used}, which its layer uses"

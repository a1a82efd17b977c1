"""The planner turns one layer's load into one layer's plan. The engine and the simulator drive it.

In each step the caller must call `begin_step`, then `plan` for each MoE layer in order, as soon as
the layer's router has run, and `copy_finished` whenever a planned copy has ended. The executor must
keep this order: the link serves copies as planned, one at a time; a slot is overwritten only after
the last planned use of its old content; an `arriving` or fetched expert runs after its own copy.

Deterministic: equal calls give equal plans. Reads no clock; all times are arguments.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from tandem.policy.ahead import Ahead
from tandem.policy.assignment.problem import LayerProblem, Split
from tandem.policy.assignment.rule import Rule
from tandem.policy.copies_ahead import CopiesAhead
from tandem.policy.cost import CostTable
from tandem.policy.decider import Decider, LayerNow, PlainDecider
from tandem.policy.eviction.policy import Eviction
from tandem.policy.link_queue import UNLIMITED, LinkQueue
from tandem.policy.plan import Copy, Geometry, Hint, LayerLoad, LayerPlan
from tandem.policy.prediction.policy import Prediction
from tandem.policy.prefetch import PrefetchChoice
from tandem.policy.prompt_copies import PromptCopies
from tandem.policy.residency import COPYING, NOWHERE, READY, Residency
from tandem.policy.ring import Ring
from tandem.policy.step_path import capture_size


class Planner:
    """Decides, with four policies, where a layer's experts run and what the link carries."""

    def __init__(
        self,
        geometry: Geometry,
        costs: CostTable,
        residency: Residency,
        *,
        rule: Rule,
        graph_rules: Mapping[int, Rule],
        eviction: Eviction,
        prediction: Prediction,
        prefetch: PrefetchChoice,
        ring: Ring,
        max_fetches: int = UNLIMITED,
        can_prefetch: bool = False,
        predicting_sizes: Sequence[int] = (),
        asking_sizes: Sequence[int] = (),
        copy_price_seconds: float = 0.0,
        decider: Callable[[PlainDecider], Decider | None] | None = None,
    ) -> None:
        """Wire the policies together.

        `graph_rules` are the rules of steps in one graph, by size; `rule` is the rule of all other
        steps. The `ring` holds fetched experts that are not admitted to the cache; if it has no
        slots, nothing is fetched. `max_fetches` limits the fetches of one layer (equation 9). With
        `can_prefetch`, planned steps prefetch predicted experts and accept hints; steps in one
        graph prefetch predicted experts if their size is in `predicting_sizes`, and accept hints if
        it is in `asking_sizes`. `copy_price_seconds` is the time that one copy costs CPU and GPU.
        `decider` must return a native decider that makes the plain decider's decisions, or None if
        there is no native decider for these policies.
        """
        self.geometry = geometry
        self.costs = costs
        self.residency = residency
        self.link = LinkQueue(costs.link)
        self._planned_rule, self._graph_rules = rule, graph_rules
        self._rule = rule  # of the current step
        self.eviction = eviction
        self.prediction = prediction
        parts = costs, residency, self.link
        self._plain = PlainDecider(
            *parts, eviction, Ahead(*parts, eviction, prediction, prefetch, copy_price_seconds)
        )
        self._decider: Decider = (decider and decider(self._plain)) or self._plain
        self.prompt = PromptCopies(geometry, residency, self.link, self._decider)
        self.ring = ring
        self._max_fetches = self._most_fetches = max_fetches if ring.size else 0
        self._can_prefetch = self._predicts = can_prefetch
        self.predicting_sizes = predicting_sizes if can_prefetch else ()
        self.asking_sizes = asking_sizes if can_prefetch else ()
        self.asks = can_prefetch
        """Whether the planner accepts hints for the current step."""
        self.ahead = CopiesAhead(*parts, self._decider, prefetch, copy_price_seconds)
        self._dense_seconds = costs.dense(1)
        self._has_every_expert = False

    def begin_step(
        self,
        num_tokens: int,
        now: float,
        *,
        token_ids: Sequence[int] = (),
        is_prefill: bool = False,
        in_graph: bool = False,
        known: Sequence[LayerLoad] = (),
    ) -> tuple[Copy, ...]:
        """Start a step of `num_tokens` tokens; return the prefetches queued at its start.

        `known` are the loads of layers routed by token id, in the layers' order; these layers are
        not predicted. For its first layer, a step `in_graph` prefetches no predicted experts.
        """
        self._rule = self.graph_rule(num_tokens) if in_graph else self._planned_rule
        self._predicts = self.predicts_in_graph(num_tokens) if in_graph else self._can_prefetch
        self.asks = self.asks_in_graph(num_tokens) if in_graph else self._can_prefetch
        self.eviction.begin_step(is_prefill=is_prefill)
        asks = in_graph and self.asks
        self._dense_seconds = self._rule.dense_seconds(self.costs, num_tokens, asks=asks)
        self.residency.release_passed(self.geometry.num_layers, ())
        self._max_fetches = self.max_graph_fetches if in_graph else self._most_fetches
        self.ring.begin_step(in_graph=in_graph, may_fetch=self._rule.fetches)
        self._has_every_expert = self.residency.has_every_expert()
        self.prompt.begin_step(num_tokens, is_prefill=is_prefill and not self.ahead.is_staged)
        if self._has_every_expert:
            return ()
        self.ahead.begin_step(known if self._can_prefetch else ())
        if self._predicts:
            self.prediction.begin_step(() if in_graph else token_ids)
        if in_graph:
            next_plan = now + self._dense_seconds
            ahead = self.ahead.in_graph(0, 0, now, next_plan, predicts=False)
            self.ahead.issue(ahead, now)
            return ahead
        return self._copies_ahead(0, frozenset(), now, now + self._dense_seconds)

    def graph_rule(self, num_tokens: int) -> Rule:
        """Return the rule of steps of `num_tokens` tokens in one graph."""
        return self._graph_rules[capture_size(num_tokens)]

    def predicts_in_graph(self, num_tokens: int) -> bool:
        """Tell whether steps of `num_tokens` tokens in one graph prefetch predicted experts."""
        return capture_size(num_tokens) in self.predicting_sizes

    def asks_in_graph(self, num_tokens: int) -> bool:
        """Tell whether steps of this size in one graph run each next layer's router early."""
        return self.predicts_in_graph(num_tokens) and capture_size(num_tokens) in self.asking_sizes

    def asks_after(self, layer: int) -> bool:
        """Tell whether `layer` runs the next layer's router early; False if that load is known."""
        return self.asks and not self.ahead.knows(layer + 1)

    @property
    def max_graph_fetches(self) -> int:
        """The most experts that a layer of a step in one graph may fetch."""
        return min(self._most_fetches, self.ring.graph_size)

    @property
    def stages_predictions(self) -> bool:
        """Whether planned decode steps copy predicted experts into staging slots."""
        return self._can_prefetch and self.ahead.is_staged

    def copy_finished(self, layer: int, expert: int, now: float) -> None:
        """Record that a planned copy has ended at `now`."""
        key = layer * self.geometry.num_experts + expert
        self.link.finish(key, now)
        if self.residency.state[key] == COPYING:
            self.residency.finish(key)

    def learn(self) -> None:
        """Learn from the layers planned so far, while CPU and GPU compute them.

        Calling this is optional: without the call a later `plan` learns the same, and takes longer.
        Plans are the same either way.
        """
        self.eviction.learn()
        self.prediction.learn()

    def plan(
        self, load: LayerLoad, now: float, hints: Sequence[Hint] = (), places: bytes = b""
    ) -> LayerPlan:
        """Return one layer's plan at time `now`; its copies count as queued on the link at once.

        `places` says where each active expert is if the model runs from the disk, as in `LayerNow`;
        a step in one graph uses the places of misses only.
        """
        if self._has_every_expert:
            return self._plan_without_misses(load, now, places)
        self.eviction.touch(load)
        asks = self.asks_after(load.layer)
        if self._predicts:
            for hint in hints if asks else ():
                self.prediction.hint(hint)
            self.prediction.observe(load)
        layer, here = load.layer, self._layer_now(load, now, places)
        in_use, states = frozenset(here.keys), here.states
        split, pairs, ahead = self._decide(here)
        next_plan = now + split.seconds + self._dense_seconds
        fetch, insert = self._place(layer, split, pairs, ahead, in_use, now)
        if len(fetch) < len(split.fetch):  # there were not enough slots
            split = split._replace(fetch=[copy.expert for copy in fetch])
        if layer + 1 < self.geometry.num_layers and not self._rule.launches:
            ahead = self._copies_ahead(layer + 1, in_use, now, next_plan)
        gpu, arriving, cpu = self._by_processor(load, states, split)
        seconds, hits = (split.gpu_seconds, split.cpu_seconds), states.count(READY)
        launches = self._rule.launches
        return LayerPlan(
            layer, gpu, arriving, fetch, cpu, insert, ahead, *seconds, hits, launches,
            asks=asks and launches > 0,
        )  # fmt: skip

    def _decide(self, layer: LayerNow) -> tuple[Split, Iterable[tuple[int, int]], tuple[Copy, ...]]:
        """Return a layer's split, (entering, leaving) keys, and, in one graph, its prefetches."""
        split = self._split(layer)
        next_plan = layer.now + split.seconds + self._dense_seconds
        ahead: tuple[Copy, ...] = ()
        if self._rule.launches:
            ahead = self.ahead.in_graph(
                layer.load.layer + 1, len(split.fetch), layer.now, next_plan,
                predicts=self._predicts,
            )  # fmt: skip
        return split, self._decider.entries(layer, split, len(ahead), next_plan), ahead

    def _split(self, layer: LayerNow) -> Split:
        load = layer.load
        is_one_token = max(load.tokens) == 1 and not layer.places
        if not is_one_token or layer.states.count(READY) < len(layer.keys):
            return self._decider.split(self._rule, layer, self._max_fetches)
        return self._rule.split_residents(load.experts, partial(self._problem, layer))

    def _plan_without_misses(self, load: LayerLoad, now: float, places: bytes) -> LayerPlan:
        """Plan a layer when all experts are resident: nothing is learned, copied or evicted."""
        here = self._layer_now(load, now, places)
        split, states = self._split(here), here.states
        gpu, _, cpu = self._by_processor(load, states, split)
        seconds = split.gpu_seconds, split.cpu_seconds
        launches = self._rule.launches
        return LayerPlan(
            load.layer, gpu, (), (), cpu, (), (), *seconds, len(states), launches,
            asks=self.asks and launches > 0,
        )  # fmt: skip

    def problem(self, load: LayerLoad, now: float) -> LayerProblem:
        """Return a layer's current assignment problem, as if all experts were in host memory."""
        return self._problem(self._layer_now(load, now, b""))

    def _problem(self, layer: LayerNow) -> LayerProblem:
        return self._plain.problem(self._rule, layer, self._max_fetches)

    def _layer_now(self, load: LayerLoad, now: float, places: bytes) -> LayerNow:
        first, state = load.layer * self.geometry.num_experts, self.residency.state
        keys = [first + expert for expert in load.experts]
        return LayerNow(load, keys, bytes([state[key] for key in keys]), now, places)

    def _place(
        self,
        layer: int,
        split: Split,
        pairs: Iterable[tuple[int, int]],
        ahead: Iterable[Copy],
        in_use: frozenset[int],
        now: float,
    ) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
        """Assign slots to fetched and to admitted experts; return (fetch, insert) copies.

        On the link, the prefetches `ahead` are queued between `fetch` and `insert`.
        """
        residency, link = self.residency, self.link
        first, set_id = layer * self.geometry.num_experts, residency.set_of(layer)
        copies: dict[int, Copy] = {}
        for key, victim in pairs:
            if victim != NOWHERE:
                residency.remove(victim)
            if residency.slot_of[key] != NOWHERE:
                residency.adopt(key, set_id)
            else:
                slot = residency.insert(key, set_id)
                copies[key] = residency.copy_of(key, slot, victim)
            self.eviction.inserted(key)
        fetch = self._fetch(first, split, copies, in_use, now) if split.fetch or copies else []
        self.ahead.issue(ahead, now)
        for key in copies:
            link.issue(key, now)
        return tuple(fetch), tuple(copies.values())

    def _fetch(
        self,
        first: int,
        split: Split,
        copies: dict[int, Copy],
        in_use: frozenset[int],
        now: float,
    ) -> list[Copy]:
        """Queue and return the copies of the split's fetched experts.

        `copies` holds the copies of admitted experts, by key; the copy of an expert that is also
        fetched is moved from there to the result. Every other fetched expert gets a slot of the
        ring, or is left out if the ring has no slot for it.
        """
        fetch = []
        num_staged = sum(first + expert not in copies for expert in split.fetch)
        ring, ready = self.ring.slots(in_use), now
        if self._rule.launches:
            ring, ready = self.ring.graph_slots(num_staged), now + self.costs.copy_wake
        for expert in split.fetch:
            key = first + expert
            copy = copies.pop(key, None)
            if copy is None and (ring_slot := next(ring, None)) is not None:
                copy = self.residency.copy_of(key, *ring_slot)
            if copy is not None:
                self.link.issue(key, ready)
                fetch.append(copy)
        return fetch

    def _copies_ahead(
        self, layer: int, in_use: frozenset[int], now: float, next_plan: float
    ) -> tuple[Copy, ...]:
        """Queue and return prefetches for `layer`, then for later layers with known loads."""
        ahead, of_prompt = tuple[Copy, ...](), self.prompt.is_on
        if of_prompt and not self.ahead.knows(layer):
            ahead = self.prompt.copies(layer, in_use, now, next_plan)
        predicts = self._predicts and not of_prompt
        return (*ahead, *self.ahead.planned(layer, in_use, now, next_plan, predicts=predicts))

    def _by_processor(
        self, load: LayerLoad, states: bytes, split: Split
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the layer's experts for the fields `gpu`, `arriving` and `cpu` of `LayerPlan`."""
        experts = load.experts
        if not split.spill and states.count(READY) == len(experts):
            return experts, (), ()
        spill, fetch = split.spill, split.fetch
        gpu, arriving, cpu = [], [], []
        for expert, held in zip(experts, states, strict=True):
            if held == READY and expert not in spill:
                gpu.append(expert)
            elif held == COPYING and expert not in spill:
                arriving.append(expert)
            elif expert not in fetch:
                cpu.append(expert)
        return tuple(gpu), tuple(arriving), tuple(cpu)

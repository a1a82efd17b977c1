"""Tests of the planner over every policy: exactly once, capacity, experts in use stay."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.errors import ConfigError
from tandem.policy.assignment import IN_GRAPH
from tandem.policy.assignment.problem import all_on_cpu
from tandem.policy.cost import CostTable
from tandem.policy.eviction import EVICTIONS
from tandem.policy.plan import Copy, Hint, LayerLoad, LayerPlan
from tandem.policy.planner import Planner
from tandem.policy.prefetch import LAYERS_PER_CHANCE, Recurrence
from tandem.policy.residency import READY
from tandem.policy.settings import POOLS, PlannerSettings, make_planner
from tandem.sim.systems import POLICIES, SimulatedSettings
from tests.policy.integrity import check_integrity, check_plan
from tests.policy.strategies import GEOMETRY, shape_costs, steps

NUM_SLOTS = 12


def planner(num_slots: int = NUM_SLOTS, link: float = 0.5, **choices: Any) -> Planner:
    chosen = SimulatedSettings(**choices)
    costs = CostTable(shape_costs(link=link))
    made = make_planner(chosen, GEOMETRY, costs, num_slots, copy_price_seconds=0.01)
    while not made.ahead.chances.note_chance():
        pass  # as if many prefetches had paid before
    return made


class Executor:
    """Runs plans; its link ends copies in order, some steps late. It checks each plan."""

    def __init__(self, planner: Planner, lag: int, *, in_graph: bool = False) -> None:
        self.planner = planner
        self.lag = lag
        self.in_graph = in_graph
        self.pending: list[Copy] = []
        self.now = 0.0
        self.log: list[object] = []

    def run(self, all_steps: list[list[LayerLoad]]) -> list[object]:
        for number, loads in enumerate(all_steps):
            ahead = self.planner.begin_step(
                3, self.now, token_ids=(number % 3, 7, 8), in_graph=self.in_graph
            )
            self.issue(ahead)
            for load in loads:
                self.now += 0.5
                self.finish(keep=self.lag)
                following = Hint("gate", load._replace(layer=load.layer + 1))
                hints = [following] if load.layer + 1 < GEOMETRY.num_layers else []
                states = self.planner.residency.state
                ready = [e for e in load.experts if states[GEOMETRY.key(load.layer, e)] == READY]
                plan = self.planner.plan(load, self.now, hints)
                self.check(load, plan)
                if self.in_graph:  # the device has published its hits, and uses no other resident
                    assert [*plan.gpu] == ready
                    assert not plan.arriving
                    assert not ahead
                    assert not plan.prefetch
                self.log.append(plan)
                self.now += plan.seconds
        return self.log

    def check(self, load: LayerLoad, plan: LayerPlan) -> None:
        check_plan(load, plan)
        in_flight = {(copy.layer, copy.expert) for copy in self.pending}
        assert not {(load.layer, e) for e in plan.gpu} & in_flight
        assert {(load.layer, e) for e in plan.arriving} <= in_flight
        self.issue(plan.fetch)
        waits_for = {(load.layer, e) for e in plan.arriving} | {c[:2] for c in plan.fetch}
        while waits_for & {copy[:2] for copy in self.pending}:  # the layer ends after its copies
            self.finish(keep=len(self.pending) - 1)
        self.issue((*plan.insert, *plan.prefetch))
        check_integrity(self.planner.residency)

    def issue(self, copies: tuple[Copy, ...]) -> None:
        for copy in copies:
            assert 0 <= copy.slot < NUM_SLOTS
            evicted_in_flight = [c for c in self.pending if (c.layer, c.expert) == copy.evicts]
            assert not evicted_in_flight, "a copy in flight is overwritten"
            self.pending.append(copy)

    def finish(self, keep: int) -> None:
        while len(self.pending) > keep:
            copy = self.pending.pop(0)
            self.planner.copy_finished(copy.layer, copy.expert, self.now)


@pytest.mark.parametrize("assignment", POLICIES.assignments.names())
@settings(max_examples=12)
@given(given_steps=steps(), lag=st.integers(0, 3))
def test_plans_are_sound_for_every_assignment(
    assignment: str, given_steps: list[list[LayerLoad]], lag: int
) -> None:
    Executor(planner(assignment=assignment), lag).run(given_steps)


@pytest.mark.parametrize("assignment", IN_GRAPH)
@settings(max_examples=40)
@given(given_steps=steps(), lag=st.integers(0, 3), link=st.sampled_from([0.01, 0.5, 50.0]))
def test_steps_in_one_graph_leave_hits_to_the_gpu(
    assignment: str, given_steps: list[list[LayerLoad]], lag: int, link: float
) -> None:
    choices: dict[str, Any] = {"prediction": "regression", "prefetch_count": 1, "link": link}
    chosen = planner(assignment=assignment, must_prefetch=False, **choices)
    Executor(chosen, lag, in_graph=True).run(given_steps)


@pytest.mark.parametrize(("eviction", "pool"), list(itertools.product(EVICTIONS.names(), POOLS)))
@settings(max_examples=12)
@given(given_steps=steps(), lag=st.integers(0, 3))
def test_plans_are_sound_for_every_eviction(
    eviction: str, pool: str, given_steps: list[list[LayerLoad]], lag: int
) -> None:
    Executor(planner(eviction=eviction, pool=pool), lag).run(given_steps)


@pytest.mark.parametrize(
    ("prediction", "prefetch", "pool"),
    list(itertools.product(POLICIES.predictions.names(), POLICIES.prefetches.names(), POOLS)),
)
@settings(max_examples=8)
@given(given_steps=steps(), lag=st.integers(0, 3))
def test_plans_are_sound_for_every_prediction(
    prediction: str, prefetch: str, pool: str, given_steps: list[list[LayerLoad]], lag: int
) -> None:
    chosen = planner(prediction=prediction, prefetch=prefetch, pool=pool, prefetch_count=1)
    Executor(chosen, lag).run(given_steps)


@pytest.mark.parametrize("eviction", EVICTIONS.names())
@settings(max_examples=10)
@given(given_steps=steps())
def test_equal_calls_give_equal_plans(eviction: str, given_steps: list[list[LayerLoad]]) -> None:
    choices: dict[str, Any] = {"eviction": eviction}
    choices |= {"prediction": "regression", "prefetch_count": 1}
    first = Executor(planner(**choices), 1).run(given_steps)
    assert Executor(planner(**choices), 1).run(given_steps) == first


@pytest.mark.parametrize("assignment", POLICIES.assignments.names())
@settings(max_examples=8)
@given(given_steps=steps(), link=st.sampled_from([0.01, 0.5, 50.0]))
def test_no_plan_is_worse_than_all_on_the_cpu(
    assignment: str, given_steps: list[list[LayerLoad]], link: float
) -> None:
    chosen = planner(assignment=assignment, link=link)
    is_pipelined = POLICIES.assignments.factory(assignment)().pipelined
    for loads in given_steps:
        chosen.begin_step(1, 0.0)
        for load in loads:
            problem = chosen.problem(load, 0.0)
            cpu_only = all_on_cpu(problem, pipelined=is_pipelined)
            plan = chosen.plan(load, 0.0)
            assert plan.seconds <= cpu_only.seconds * (1 + 1e-9)
            for copy in (*plan.fetch, *plan.insert):
                chosen.copy_finished(copy.layer, copy.expert, 0.0)


def test_copies_may_finish_in_any_order() -> None:
    chosen = planner(eviction="lru", assignment="hits-on-gpu")
    chosen.begin_step(1, 0.0)
    plan = chosen.plan(LayerLoad(0, (1, 2, 3), (1, 1, 1)), 0.0)
    assert [copy.expert for copy in plan.insert] == [1, 2, 3]
    for copy in reversed(plan.insert):
        chosen.copy_finished(copy.layer, copy.expert, 1.0)
    assert chosen.plan(LayerLoad(0, (1, 2, 3), (1, 1, 1)), 2.0).gpu == (1, 2, 3)


def test_an_expert_whose_copy_is_under_way_is_a_hit_that_waits() -> None:
    chosen = planner(eviction="lru", assignment="hits-on-gpu")
    chosen.begin_step(1, 0.0)
    chosen.plan(LayerLoad(0, (1,), (1,)), 0.0)
    assert chosen.plan(LayerLoad(0, (1,), (1,)), 0.1).arriving == (1,)


def test_resident_experts_spill_where_the_cpu_is_quicker() -> None:
    costs = CostTable(shape_costs(cpu=(1.0, 2.0), gpu=(1.0, 1.0)))
    keys = [GEOMETRY.key(0, expert) for expert in range(3)]
    chosen = make_planner(PlannerSettings(), GEOMETRY, costs, NUM_SLOTS, resident=keys)
    chosen.begin_step(1, 0.0)
    plan = chosen.plan(LayerLoad(0, (0, 1), (1, 1)), 0.0)
    assert (plan.gpu, plan.cpu, plan.seconds) == ((0,), (1,), 1.0)
    assert chosen.plan(LayerLoad(0, (0, 2), (1, 1)), 0.0).cpu == (2,)


def test_in_planned_steps_they_spill_only_where_that_pays_the_hosts_work_too() -> None:
    shape = shape_costs(cpu=(1.0, 2.0), gpu=(1.0, 1.0))
    costs = CostTable(dataclasses.replace(shape, planned_first_expert_seconds=1.5))
    keys = [GEOMETRY.key(0, expert) for expert in range(3)]
    chosen = make_planner(PlannerSettings(), GEOMETRY, costs, NUM_SLOTS, resident=keys)
    chosen.begin_step(1, 0.0)
    assert chosen.plan(LayerLoad(0, (0, 1), (1, 1)), 0.0).cpu == ()


@pytest.mark.parametrize("num_cached", [1, 6, 100, 768, 1536, 1664, 6144])
@pytest.mark.parametrize("prefetch", ["pays", "none"])
def test_so_many_slots_leave_the_cache_what_it_needs(num_cached: int, prefetch: str) -> None:
    settings = PlannerSettings(prefetch=prefetch)
    num_slots = settings.slots_for(num_cached)
    assert num_slots - settings.extra_slots(num_slots) >= num_cached
    assert num_slots == num_cached or (
        num_slots - 1 - settings.extra_slots(num_slots - 1) < num_cached
    )


@given(given_steps=steps())
def test_a_cache_of_the_whole_model_plans_as_if_it_learned(
    given_steps: list[list[LayerLoad]],
) -> None:
    costs = CostTable(shape_costs())
    keys = range(GEOMETRY.num_layers * GEOMETRY.num_experts)
    whole, learning = (
        make_planner(PlannerSettings(), GEOMETRY, costs, len(keys) + 2, resident=keys)
        for _ in range(2)
    )
    for loads in given_steps:
        whole.begin_step(1, 0.0)  # it finds that nothing is absent
        for load in loads:
            plan = whole.plan(load, 0.0)
            assert plan == learning.plan(load, 0.0)
            check_plan(load, plan)


@settings(max_examples=40)
@given(given_steps=steps(), calls=st.lists(st.booleans(), min_size=1, max_size=7))
def test_when_the_planner_learns_changes_no_plan(
    given_steps: list[list[LayerLoad]], calls: list[bool]
) -> None:
    choices: dict[str, Any] = {"prediction": "regression", "prefetch_count": 1}
    never, sometimes = planner(**choices), planner(**choices)
    learns = itertools.cycle(calls)
    plan = sometimes.plan

    def plan_and_learn(
        load: LayerLoad, now: float, hints: Sequence[Hint] = (), places: bytes = b""
    ) -> LayerPlan:
        made = plan(load, now, hints, places)
        if next(learns):
            sometimes.learn()
        return made

    sometimes.plan = plan_and_learn  # type: ignore[method-assign]
    assert Executor(sometimes, 1).run(given_steps) == Executor(never, 1).run(given_steps)


def test_problems_of_long_prompts_can_be_posed() -> None:
    chosen = planner()
    assert chosen.problem(LayerLoad(0, (1,), (999,)), 0.0).cpu == [999.0]


def test_copies_ahead_wait_until_chances_recur() -> None:
    rare, frequent = Recurrence(), Recurrence()
    for layer in range(100 * LAYERS_PER_CHANCE):
        rare.layer_passed()
        frequent.layer_passed()
        if layer % (2 * LAYERS_PER_CHANCE) == 0:
            assert not rare.note_chance()
        if layer % (LAYERS_PER_CHANCE // 4) == 0:
            frequent.note_chance()
    assert frequent.note_chance()


def test_without_slots_everything_runs_on_the_cpu() -> None:
    chosen = planner(num_slots=0)
    chosen.begin_step(1, 0.0)
    plan = chosen.plan(LayerLoad(1, (0, 5), (2, 1)), 0.0)
    assert plan.cpu == (0, 5)
    assert not plan.fetch


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"assignment": "dalli"}, "unknown assignment 'dalli'; did you mean 'dali'?"),
        # Names of the simulator's alone, which is imported above.
        ({"prediction": "popularity"}, "unknown prediction 'popularity'; known: regression, none"),
        ({"prefetch": "top-k"}, "unknown prefetch choice 'top-k'; known: pays, none"),
        ({"pool": "layer"}, "pool is 'layer'; expected one of by-layer, shared"),
        ({"prefetch_count": -1}, "prefetch_count is -1; expected at least 0"),
    ],
)
def test_unknown_choices_are_refused(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        PlannerSettings(**choice)


@pytest.mark.parametrize(
    ("source", "link", "expected"), [("gate", 1.8, [5]), ("gate", 2.2, []), ("other", 1.8, [])]
)
def test_a_copy_ahead_may_end_late_if_a_router_named_it_and_the_cpu_would_end_later(
    source: str, link: float, expected: list[int]
) -> None:
    """The link is idle for 1.0 until the next layer; an expert takes the CPU 1.0."""
    chosen = planner(link=link, prediction="gate", prefetch_count=1, eviction="lru")
    for key in (0, 1):
        chosen.residency.insert(key, 0)
        chosen.residency.finish(key)
    chosen.begin_step(1, 0.0)
    hint = Hint(source, LayerLoad(1, (5,), (1,)))
    plan = chosen.plan(LayerLoad(0, (0, 1), (1, 1)), 0.0, [hint])
    assert plan.gpu == (0, 1)
    assert [copy.expert for copy in plan.prefetch] == expected


def test_a_step_in_one_graph_copies_ahead_into_clear_slots_before_it_copies_for_later() -> None:
    """Experts in use keep their slots and are not copied again; others leave."""
    chosen = planner(
        num_slots=24, prediction="gate", prefetch_count=1, predicting_sizes=(1,), asking_sizes=(1,),
        assignment="ready-on-gpu",
    )  # fmt: skip
    residency, link = chosen.residency, chosen.link
    assert chosen.begin_step(1, 0.0, in_graph=True) == ()
    hints = [Hint("gate", LayerLoad(1, (5,), (1,)))]
    plan = chosen.plan(LayerLoad(0, (0, 1), (1, 1)), 0.0, hints)
    assert plan.cpu == (0, 1)
    assert [(copy.layer, copy.expert, copy.evicts) for copy in plan.prefetch] == [(1, 5, None)]
    later = [GEOMETRY.key(0, copy.expert) for copy in plan.insert]
    assert [*link.pending] == [GEOMETRY.key(1, 5), *later]
    assert plan.insert
    for key in [*link.pending]:
        chosen.copy_finished(*GEOMETRY.expert_id(key), 2.0)
    slot = residency.slot_of[GEOMETRY.key(1, 5)]
    plan = chosen.plan(LayerLoad(1, (5,), (1,)), 2.5, [Hint("gate", LayerLoad(2, (3,), (1,)))])
    assert (plan.gpu, plan.insert) == ((5,), ())
    assert residency.slot_of[GEOMETRY.key(1, 5)] == slot
    assert residency.members[1] == [GEOMETRY.key(1, 5)]
    assert [copy.expert for copy in plan.prefetch] == [3]
    chosen.begin_step(2, 3.0, in_graph=True)
    plan = chosen.plan(LayerLoad(0, (2, 3), (1, 1)), 3.0, hints)
    assert not plan.prefetch  # steps of two tokens do not


def test_a_step_in_one_graph_that_asks_no_router_takes_no_hints() -> None:
    chosen = planner(
        num_slots=24, prediction="gate", prefetch_count=1, predicting_sizes=(1,),
        assignment="ready-on-gpu",
    )  # fmt: skip
    chosen.begin_step(1, 0.0, in_graph=True)
    plan = chosen.plan(LayerLoad(0, (0, 1), (1, 1)), 0.0, [Hint("gate", LayerLoad(1, (5,), (1,)))])
    assert (plan.prefetch, plan.asks) == ((), False)


def test_what_a_step_in_one_graph_has_copied_ahead_in_vain_leaves_with_it() -> None:
    chosen = planner(
        num_slots=24, prediction="gate", prefetch_count=1, predicting_sizes=(1,), asking_sizes=(1,),
        assignment="ready-on-gpu",
    )  # fmt: skip
    residency, key = chosen.residency, GEOMETRY.key(1, 5)
    chosen.begin_step(1, 0.0, in_graph=True)
    chosen.plan(LayerLoad(0, (0, 1), (1, 1)), 0.0, [Hint("gate", LayerLoad(1, (5,), (1,)))])
    chosen.begin_step(1, 0.1, in_graph=True)
    assert residency.slot_of[key] >= 0  # its copy has not ended
    chosen.copy_finished(1, 5, 0.5)
    chosen.begin_step(1, 1.0, in_graph=True)
    assert residency.slot_of[key] < 0
    check_integrity(residency)


def test_requested_prefetches_are_followed_in_one_graph() -> None:
    requested = PlannerSettings(prediction="regression", prefetch_count=2)
    assert requested.with_predictions(()).predicting_sizes == (1, 2, 4, 8)
    usual = PlannerSettings(prediction="regression", prefetch_count=2, must_prefetch=False)
    assert usual.with_predictions((4,)).predicting_sizes == (4,)
    nothing = PlannerSettings(prediction="none", prefetch_count=2)
    assert nothing.with_predictions((4,)) is nothing
    other = SimulatedSettings(prediction="gate", prefetch_count=2)
    assert other.with_predictions((4,)) is other  # its steps are planned

"""Tests of the native decider against the plain one: random layers, routing, recorded runs."""

import dataclasses
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.experts.cache.native_predictor import NativePredictor
from tandem.experts.cache.policy_tables import NATIVE_TABLES
from tandem.hardware.profiles import load_profile, shape_for
from tandem.kernels import _native
from tandem.policy.ahead import Coming
from tandem.policy.assignment import ASSIGNMENTS, IN_GRAPH, NATIVE
from tandem.policy.assignment.problem import LayerProblem, Split
from tandem.policy.assignment.rule import Rule
from tandem.policy.cost import CostTable
from tandem.policy.decider import Decider, LayerNow, PlainDecider
from tandem.policy.link_queue import UNLIMITED
from tandem.policy.plan import Copy, Geometry, Hint, LayerLoad, LayerPlan
from tandem.policy.planner import Planner
from tandem.policy.prediction import RegressionPredictor
from tandem.policy.prefetch import Recurrence
from tandem.policy.reads import IN_SLOT, ON_DISK
from tandem.policy.residency import COPYING, EMPTY, NOWHERE, READY
from tandem.policy.settings import Native, make_planner, make_planner_on
from tandem.policy.step_path import CAPTURE_SIZES
from tandem.sim.steps import LoadReader, replay_steps
from tandem.sim.systems import TANDEM
from tandem.sim.timeline import Timeline
from tandem.trace import read_trace
from tests.experts.captured import sure_of_predictions
from tests.experts.machines import make_machine
from tests.experts.test_policy_tables import random_load
from tests.policy.integrity import check_integrity
from tests.policy.strategies import problems

TRACE = Path(__file__).parents[2] / "data" / "traces" / "deepseek-v2-lite.npz"
NATIVE_SETTINGS = dataclasses.replace(TANDEM, copies_prompts=True)


@pytest.mark.parametrize("name", NATIVE)
@given(layer=st.booleans().flatmap(lambda over_disk: problems(over_disk=over_disk)))
def test_every_layer_is_split_alike(name: str, layer: LayerProblem) -> None:
    """Experts may be resident, absent, in transit or on a disk, and equally loaded.

    A step in one graph fetches nothing from a disk and waits for its reads.
    """
    cpu, gpu = [layer.cpu[i // 2] for i in range(len(layer.cpu))], layer.gpu
    scores = [i * 7 % 3 for i in range(len(cpu))]
    layer = layer._replace(cpu=cpu, scores=scores, copy_wake=layer.cpu_first)
    states = [EMPTY if w < 0 else COPYING if w else READY for w in layer.wait]
    table = array("I", [0] * 3 + scores)
    costs = _native.Costs(
        [0.0, *cpu], [0.0, *gpu], layer.cpu_first, layer.link, layer.cpu_slowdown,
        layer.link_slowdown, layer.copy_wake, layer.read,
    )  # fmt: skip
    for never_worse in (False, True):
        rule = Rule(ASSIGNMENTS.factory(name)(), never_worse_than_cpu=never_worse)
        fetch, spill, *seconds = _native.split_layer(
            costs, NATIVE.index(name), never_worse, layer.max_fetches, layer.experts,
            range(1, len(cpu) + 1), bytes(states), layer.wait, memoryview(table), layer.link_busy,
            bytes(layer.places),
        )  # fmt: skip
        expected = rule.split(layer)
        assert ([*fetch], [*spill], *seconds) == (
            [*expected.fetch], [*expected.spill], *expected[2:],
        )  # fmt: skip
        if name in IN_GRAPH and not never_worse and layer.places:
            places = dict(zip(layer.experts, layer.places, strict=True))
            assert all(places[expert] == IN_SLOT for expert in fetch)
            misses = [e for e, wait in zip(layer.experts, layer.wait, strict=True) if wait]
            num_reads = sum(places[expert] == ON_DISK for expert in misses)
            assert seconds[1] >= layer.read * num_reads


class Counting:
    """A decider that counts the calls of another one."""

    def __init__(self, decider: Decider, counts: Counter[str]) -> None:
        self._decider, self._counts, self.entries = decider, counts, decider.entries
        self.most_valued = decider.most_valued

    def split(self, rule: Rule, layer: LayerNow, max_fetches: int) -> Split:
        kind = "one" if max(layer.load.tokens) == 1 else "several"
        self._counts[kind] += 1
        self._counts["coming"] += COPYING in layer.states
        return self._decider.split(rule, layer, max_fetches)

    def predicted(self, coming: Coming, chances: Recurrence) -> Iterable[tuple[int, int]]:
        pairs = [*self._decider.predicted(coming, chances)]
        self._count("predicted", pairs)
        return pairs

    def known(self, load: LayerLoad, coming: Coming) -> tuple[int, Iterable[tuple[int, int]]]:
        num_chosen, copied = self._decider.known(load, coming)
        pairs = [*copied]
        self._count("known", pairs)
        self._counts["left"] += num_chosen - len(pairs)
        return num_chosen, pairs

    def _count(self, name: str, pairs: Sequence[tuple[int, int]]) -> None:
        over = sum(victim != NOWHERE for _, victim in pairs)
        self._counts[f"{name} over residents"] += over
        self._counts[f"{name} into free slots"] += len(pairs) - over


def counting(counts: Counter[str]) -> Native:
    """Return native policies whose decider counts its calls."""

    def make(plain: PlainDecider) -> Decider:
        decider = NATIVE_TABLES.decider(plain)
        assert decider is not None
        return Counting(decider, counts)

    return NATIVE_TABLES._replace(decider=make)


@pytest.mark.parametrize("link", [0.0, 0.3, 3.0])
@pytest.mark.parametrize(
    ("never_worse", "max_fetches", "slowdown"),
    [(True, UNLIMITED, 1.0), (False, 2, 1.0), (True, UNLIMITED, 1.6), (False, UNLIMITED, 1.15)],
)
def test_plans_are_alike_on_random_routing(
    link: float, never_worse: bool, max_fetches: int, slowdown: float
) -> None:
    """Use steps of one or more tokens, prompts, and copies that end at random.

    Sometimes more experts are chosen than by the model, as a forced trace may do.
    """
    draw, geometry, counts = random.Random(int(10 * link)), Geometry(3, 24, 4), Counter[str]()
    settings = dataclasses.replace(
        NATIVE_SETTINGS, never_worse_than_cpu=never_worse, max_fetches=max_fetches
    )
    costs = CostTable(
        make_machine(geometry, link=link, gpu=0.3).shape,
        cpu_slowdown=slowdown,
        link_slowdown=slowdown,
    )
    plain, native = (
        make_planner(settings, geometry, costs, 40, resident=range(0, 72, 5), tables=tables)
        for tables in (None, counting(counts))
    )
    now, under_way = 0.0, list[Copy]()
    for step in range(150):
        is_prefill = step % 20 == 0
        num_tokens = 100 if is_prefill else (1, 1, 2, 1, 7)[step % 5]
        ahead = plain.begin_step(num_tokens, now, is_prefill=is_prefill)
        assert native.begin_step(num_tokens, now, is_prefill=is_prefill) == ahead
        under_way += ahead
        for layer in range(geometry.num_layers):
            load = random_load(draw, layer, num_tokens, 6 if step % 7 == 0 else 4)
            expected, actual = plain.plan(load, now), native.plan(load, now)
            assert as_lists(actual) == as_lists(expected)
            check_integrity(native.residency)
            waited_for = len(under_way) + len(expected.fetch) if expected.fetch else 0
            under_way += [*expected.fetch, *expected.insert, *expected.prefetch]
            now += draw.uniform(0.5, 1.5) * expected.seconds
            while under_way and (waited_for > 0 or draw.random() < 0.8):
                copy, waited_for = under_way.pop(0), waited_for - 1
                plain.copy_finished(copy.layer, copy.expert, now)
                native.copy_finished(copy.layer, copy.expert, now)
    assert min(counts["one"], counts["several"]) > 50
    assert link == 0.0 or counts["coming"] > 5


@pytest.mark.parametrize(
    ("hardware", "batch", "prompt", "in_graph"),
    [
        ("desktop-12gb", 1, 1, False),
        ("laptop-8gb", 4, 48, False),
        ("desktop-16gb", 8, 1, False),
        ("desktop-16gb", 2, 1, True),
    ],
)
def test_plans_are_alike_on_recorded_runs(
    hardware: str, batch: int, prompt: int, *, in_graph: bool
) -> None:
    """Copies end as on that machine: some are late, some end while their layer runs."""
    trace, profile = read_trace(TRACE), load_profile(hardware)
    geometry, counts = trace.meta.geometry, Counter[str]()
    shape = shape_for(profile, trace.meta.model, geometry)
    settings = dataclasses.replace(
        NATIVE_SETTINGS, fetching_sizes=CAPTURE_SIZES, predicting_sizes=CAPTURE_SIZES
    )
    plain, native = (
        make_planner_on(profile, shape, settings, geometry, 600, tables=tables)
        for tables in (None, NATIVE_TABLES)
    )
    for each in (plain, native):
        sure_of_predictions(each)
    timeline, reader = Timeline(profile, shape), LoadReader(trace)
    for step in list(replay_steps(trace, batch, prompt=prompt))[:24]:
        begins = [
            each.begin_step(
                len(step.tokens), timeline.now, is_prefill=step.is_prefill,
                in_graph=in_graph and not step.is_prefill,
            )
            for each in (plain, native)
        ]  # fmt: skip
        ahead = begins[0]
        assert begins[1] == ahead
        timeline.issue(ahead)
        for load in reader.loads(step):
            timeline.run_dense(len(step.tokens))
            for arrival in timeline.arrivals():
                plain.copy_finished(*arrival)
                native.copy_finished(*arrival)
            plan = plain.plan(load, timeline.now)
            assert as_lists(native.plan(load, timeline.now)) == as_lists(plan)
            timeline.run(load, plan)
            counts["fetched"] += len(plan.fetch)
            counts["entered"] += len(plan.insert)
            counts["ahead"] += len(plan.prefetch)
    check_same(plain, native)
    assert counts["fetched"] + counts["entered"] > 50
    assert counts["ahead"] > 20 or (prompt == 1 and not in_graph)  # the link has no idle time


@pytest.mark.parametrize("link", [0.2, 0.6])
@pytest.mark.parametrize(
    ("in_graph", "copies_prompts"), [(False, False), (False, True), (True, False)]
)
def test_copies_ahead_are_alike_on_random_routing(
    link: float, *, in_graph: bool, copies_prompts: bool
) -> None:
    """Predicted experts, routers' predictions and known loads go into free and resident slots."""
    draw, geometry, counts = random.Random(int(10 * link)), Geometry(4, 24, 4), Counter[str]()
    settings = dataclasses.replace(
        TANDEM, prefetch_count=3, copies_prompts=copies_prompts, fetching_sizes=CAPTURE_SIZES,
        predicting_sizes=CAPTURE_SIZES if in_graph else (), asking_sizes=CAPTURE_SIZES,
    )  # fmt: skip
    costs = CostTable(make_machine(geometry, link=link, gpu=0.3).shape)
    plain, native = (
        make_planner(
            settings, geometry, costs, 70, resident=range(0, 96, 3), tables=tables,
            copy_price_seconds=0.05,
        )
        for tables in (None, counting(counts))
    )  # fmt: skip
    both = plain, native
    for each in both:
        sure_of_predictions(each)
    now, under_way = 0.0, list[Copy]()
    for step in range(120):
        num_tokens = (1, 2, 1, 4)[step % 4]
        loads = [random_load(draw, layer, num_tokens, 4) for layer in range(4)]
        known = loads[: step % 3]
        ids = [draw.randrange(3) for _ in range(num_tokens)]
        expected, ahead = (
            each.begin_step(num_tokens, now, token_ids=ids, in_graph=in_graph, known=known)
            for each in both
        )
        assert ahead == expected
        under_way += ahead
        for load in loads:
            hints = [
                Hint(source, random_load(draw, load.layer + 1, num_tokens, 4))
                for source in ("gate", "residual", "residual")[: draw.randrange(4)]
                if load.layer < 3
            ]
            plan, actual = (each.plan(load, now, hints) for each in both)
            assert as_lists(actual) == as_lists(plan)
            under_way += [*plan.fetch, *plan.prefetch, *plan.insert]
            now += draw.uniform(0.5, 1.5) * plan.seconds
            while under_way and draw.random() < 0.85:
                copy = under_way.pop(0)
                for each in both:
                    each.copy_finished(copy.layer, copy.expert, now)
            check_integrity(native.residency)
    check_same(plain, native)
    assert isinstance(plain.prediction, RegressionPredictor)
    assert isinstance(native.prediction, NativePredictor)
    assert native.prediction.state() == plain.prediction.state()
    place = "over residents" if not in_graph and not copies_prompts else "into free slots"
    assert counts[f"known {place}"] > 50
    place = "into free slots" if in_graph else "over residents"
    assert counts[f"predicted {place}"] > 200
    assert counts["left"] > 0


def as_lists(plan: LayerPlan) -> list[object]:
    return [[*part] if isinstance(part, list | tuple) else part for part in plan]


def check_same(plain: Planner, native: Planner) -> None:
    assert native.residency.slot_of == plain.residency.slot_of
    assert native.residency.members == plain.residency.members
    assert native.link.free_at == plain.link.free_at


def test_numbers_that_do_not_fit_are_refused() -> None:
    costs, table = (
        _native.Costs([0.0, 1.0], [0.0, 1.0], 0, 1, 1, 1, 0, 0),
        memoryview(array("I", [0] * 4)),
    )
    absent, two = bytes(2), ((0, 3), (1, 1))
    with pytest.raises(ValueError, match="expert 4, expected 0 to 3"):
        _native.split_layer(costs, 3, False, 1, (0, 4), (1, 1), absent, (), table, 0.0, b"")
    with pytest.raises(ValueError, match="an assignment rule from 0 to 3"):
        _native.split_layer(costs, 4, False, 1, *two, absent, (), table, 0.0, b"")
    with pytest.raises(ValueError, match="no places, or one for each expert"):
        _native.split_layer(costs, 3, False, 1, *two, absent, (), table, 0.0, bytes(3))
    with pytest.raises(ValueError, match="places from 0 to 2"):
        _native.split_layer(costs, 3, False, 1, *two, absent, (), table, 0.0, bytes([0, 3]))
    with pytest.raises(
        IndexError, match="an expert has 2 tokens, but costs are known only up to 1"
    ):
        _native.split_layer(costs, 3, False, 1, (0, 3), (1, 2), absent, (), table, 0.0, b"")
    with pytest.raises(ValueError, match="an arrival time for each copy in progress"):
        _native.split_layer(costs, 3, False, 1, *two, bytes([COPYING, EMPTY]), (), table, 0.0, b"")
    with pytest.raises(ValueError, match="a state and a 32-bit score"):
        _native.layer_entries((0, 3), bytes(5), table, 0, (), (), 1, (), 1)
    with pytest.raises(ValueError, match="expert 4, expected 0 to 3"):
        _native.layer_entries((0, 3), bytes(4), table, 8, (12,), (), 1, (), 1)
    with pytest.raises(ValueError, match="a state and a 32-bit score"):
        _native.most_valued(bytes(5), table, 0, 1)

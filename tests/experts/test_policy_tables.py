"""The native tables against the plain ones, on real routing: the same answers to the last bit."""

import dataclasses
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tandem.experts.cache.policy_tables import NATIVE_TABLES
from tandem.policy.cost import CostTable
from tandem.policy.eviction import rule_choice
from tandem.policy.eviction.next_use import NextUse
from tandem.policy.link_queue import UNLIMITED
from tandem.policy.plan import Copy, Geometry, LayerLoad
from tandem.policy.prediction.regression_predictor import RegressionPredictor
from tandem.policy.settings import make_planner
from tandem.policy.tables import DecideSingleToken, SingleTokenDecision, SingleTokenTerms
from tandem.sim.steps import LoadReader, replay_steps
from tandem.sim.systems import TANDEM
from tandem.trace import RoutingTrace, read_trace
from tests.experts.machines import make_machine
from tests.policy.integrity import check_integrity

TRACES = Path(__file__).parents[2] / "data" / "traces"
STEPS = 60


def steps_of(trace: RoutingTrace, batch: int) -> list[tuple[list[int], bool, list[LayerLoad]]]:
    """Return (token ids, is it a prompt, loads) of a trace's first steps."""
    found, reader = [], LoadReader(trace)
    for step in list(replay_steps(trace, batch, prompt=12))[:STEPS]:
        ids = [] if trace.token_ids is None else trace.token_ids[step.tokens].tolist()
        found.append((ids, step.is_prefill, reader.loads(step)))
    return found


@pytest.fixture(scope="module", params=["deepseek-v2-lite", "gpt-oss-20b"])
def trace(request: pytest.FixtureRequest) -> RoutingTrace:
    return read_trace(TRACES / f"{request.param}.npz")


@pytest.mark.parametrize("batch", [1, 5])
def test_evictions_rank_alike(trace: RoutingTrace, batch: int) -> None:
    """Both are asked and may learn at other moments: that changes no answer."""
    draw, geometry = random.Random(batch), trace.meta.geometry
    plain, native = NextUse(geometry), NextUse(geometry, tables=NATIVE_TABLES)
    for policy in (plain, native):
        policy.resized([geometry.num_experts // 4] * geometry.num_layers)
    for _, is_prefill, loads in steps_of(trace, batch):
        plain.begin_step(is_prefill=is_prefill)
        native.begin_step(is_prefill=is_prefill)
        for load in loads:
            plain.touch(load)
            native.touch(load)
            if draw.random() < 0.5:
                native.learn()
            if draw.random() < 0.3:
                first = load.layer * geometry.num_experts
                keys = range(first, first + geometry.num_experts)
                assert native.scores(keys) == plain.scores(keys)


@pytest.mark.parametrize("batch", [1, 6])
def test_evictions_follow_the_same_rules(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On routing whose kind changes, with margins so small that rules often change.

    Both learn at other moments, also of layers that leave LRU together.
    """
    monkeypatch.setattr(rule_choice, "MARGIN", 3)
    monkeypatch.setattr(rule_choice, "BACK_MARGIN", 1)
    monkeypatch.setattr(rule_choice, "START_DEVIATIONS", 2)
    draw, geometry = random.Random(batch), Geometry(2, 24, 3)
    plain, native = NextUse(geometry), NextUse(geometry, tables=NATIVE_TABLES)
    followed: Counter[str] = Counter()
    for step in range(1600):
        if step in (0, 900):
            for policy in (plain, native):
                policy.resized([9 + step // 300] * 2)
        for policy in (plain, native):
            policy.begin_step(is_prefill=step % 97 == 0)
        for layer in range(2):
            if step % 800 < 400:
                routes = [[(3 * step + 5 * t + i) % 14 for i in range(3)] for t in range(batch)]
                tokens = Counter(expert for route in routes for expert in set(route))
                experts = tuple(sorted(tokens))
                load = LayerLoad(layer, experts, tuple(tokens[e] for e in experts), (), routes)
            else:
                load = random_load(draw, layer, batch, 3)
            for policy in (plain, native):
                policy.touch(load)
            if draw.random() < 0.5:
                native.learn()
            if draw.random() < 0.3:
                plain.learn()
            assert native.rule(layer) == plain.rule(layer)
            keys = range(24 * layer, 24 * layer + 24)
            assert native.scores(keys) == plain.scores(keys)
            followed[plain.rule(layer)] += 1
    assert set(followed) == set(rule_choice.RULES)


@pytest.mark.parametrize("batch", [1, 5])
def test_predictions_are_alike(trace: RoutingTrace, batch: int) -> None:
    draw, geometry = random.Random(batch), trace.meta.geometry
    plain, native = (
        RegressionPredictor(geometry),
        RegressionPredictor(geometry, tables=NATIVE_TABLES),
    )
    compared = 0
    for ids, _, loads in steps_of(trace, batch):
        plain.begin_step(ids)
        native.begin_step(ids)
        for load in loads:
            if draw.random() < 0.5:
                expected, actual = plain.predict(load.layer), native.predict(load.layer)
                assert (expected is None) == (actual is None)
                if expected is not None and actual is not None:
                    assert list(actual.scores) == list(expected.scores)
                    assert actual._replace(scores=()) == expected._replace(scores=())
                    compared += 1
            plain.observe(load)
            native.observe(load)
            if draw.random() < 0.5:
                native.learn()
    assert compared > STEPS


@pytest.mark.parametrize("link", [0.0, 0.3, 3.0])
@pytest.mark.parametrize(
    ("never_worse", "max_fetches", "slowdown"),
    [(True, UNLIMITED, 1.0), (False, 2, 1.0), (True, UNLIMITED, 1.6), (False, UNLIMITED, 1.15)],
)
def test_single_tokens_are_planned_alike(
    link: float, never_worse: bool, max_fetches: int, slowdown: float
) -> None:
    """Random routing, with layers of two tokens between and copies that end at random.

    Now and then more experts are chosen than the model would: a trace may be forced onto it.
    """
    draw, geometry = random.Random(int(10 * link)), Geometry(3, 24, 4)
    settings = dataclasses.replace(
        TANDEM, never_worse_than_cpu=never_worse, max_fetches=max_fetches
    )
    costs = CostTable(
        make_machine(geometry, link=link, gpu=0.3).shape,
        cpu_slowdown=slowdown,
        link_slowdown=slowdown,
    )
    asked = 0

    def counting(terms: SingleTokenTerms) -> DecideSingleToken:
        native = NATIVE_TABLES.single_token
        assert native is not None
        decide = native(terms)

        def count(*layer: Any) -> SingleTokenDecision:
            nonlocal asked
            asked += 1
            return decide(*layer)

        return count

    plain, native = (
        make_planner(settings, geometry, costs, 30, resident=range(0, 72, 5), tables=tables)
        for tables in (None, NATIVE_TABLES._replace(single_token=counting))
    )
    now, under_way = 0.0, list[Copy]()
    for step in range(150):
        num_tokens = 2 if step % 10 == 0 else 1
        ahead = plain.begin_step(num_tokens, now)
        assert native.begin_step(num_tokens, now) == ahead
        under_way += ahead
        for layer in range(geometry.num_layers):
            load = random_load(draw, layer, num_tokens, 6 if step % 7 == 0 else 4)
            expected, actual = plain.plan(load, now), native.plan(load, now)
            assert actual == expected
            check_integrity(native.residency)
            waited_for = len(under_way) + len(expected.fetch) if expected.fetch else 0
            under_way += [*expected.fetch, *expected.insert, *expected.prefetch]
            now += draw.uniform(0.5, 1.5) * expected.seconds
            while under_way and (waited_for > 0 or draw.random() < 0.8):
                copy, waited_for = under_way.pop(0), waited_for - 1
                plain.copy_finished(copy.layer, copy.expert, now)
                native.copy_finished(copy.layer, copy.expert, now)
    assert asked > 50


def random_load(draw: random.Random, layer: int, num_tokens: int, top_k: int) -> LayerLoad:
    """Return what some tokens want of 24 experts, popular ones more often."""
    routes = [
        sorted(sorted(range(24), key=lambda e: (e + 1) * draw.random())[:top_k])
        for _ in range(num_tokens)
    ]
    tokens = Counter(expert for route in routes for expert in route)
    experts = tuple(sorted(tokens))
    return LayerLoad(layer, experts, tuple(tokens[e] for e in experts), (), routes)


def test_any_integer_may_be_a_token_id() -> None:
    """Models mark images by negative ids; -1 was what an empty place said."""
    geometry = Geometry(2, 8, 2)
    plain, native = (
        RegressionPredictor(geometry),
        RegressionPredictor(geometry, tables=NATIVE_TABLES),
    )
    for step, token in enumerate([-1, 1023, -200, -1, 824, -1, 2**40, -(2**40)] * 3):
        for predictor in (plain, native):
            predictor.begin_step([token])
            predictor.observe(LayerLoad(0, (step % 4, 4 + step % 3), (1, 1)))
        for layer in range(2):
            expected, actual = plain.predict(layer), native.predict(layer)
            assert expected is not None
            assert actual is not None
            assert list(actual.scores) == list(expected.scores)


def test_numbers_that_do_not_exist_are_refused() -> None:
    table = NATIVE_TABLES.next_use(Geometry(2, 8, 2))[1]
    with pytest.raises(ValueError, match="expert 8, expected 0 to 7"):
        table.note(LayerLoad(1, (3, 8), (1, 1)), 1, (3, 8), ())
    tables = NATIVE_TABLES.prediction(Geometry(2, 8, 2))
    with pytest.raises(ValueError, match="layer 2, expected 0 to 1"):
        tables.scores(2, (), ())

"""Tests of the native tables against the plain ones on real routing: bit-identical answers."""

import random
from collections import Counter
from pathlib import Path

import pytest

from tandem.experts.cache.native_predictor import NativePredictor
from tandem.experts.cache.policy_tables import NATIVE_TABLES
from tandem.policy.eviction import rule_choice
from tandem.policy.eviction.next_use import NextUse
from tandem.policy.plan import Geometry, LayerLoad
from tandem.policy.prediction.regression_predictor import RegressionPredictor
from tandem.sim.steps import LoadReader, replay_steps
from tandem.trace import RoutingTrace, read_trace

TRACES = Path(__file__).parents[2] / "data" / "traces"
STEPS = 60


def steps_of(trace: RoutingTrace, batch: int) -> list[tuple[list[int], bool, list[LayerLoad]]]:
    """Return (token ids, whether it is a prompt, loads) of a trace's first steps."""
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
    """Both may learn at different moments; that must not change an answer."""
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
    """Use routing that changes its kind, and margins so small that rules change often.

    Both learn at different moments, also from layers that leave LRU together.
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
    plain, native = RegressionPredictor(geometry), NativePredictor(geometry)
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


def random_load(draw: random.Random, layer: int, num_tokens: int, top_k: int) -> LayerLoad:
    """Return a load of 24 experts for some tokens, popular experts more often."""
    routes = [
        sorted(sorted(range(24), key=lambda e: (e + 1) * draw.random())[:top_k])
        for _ in range(num_tokens)
    ]
    tokens = Counter(expert for route in routes for expert in route)
    experts = tuple(sorted(tokens))
    return LayerLoad(layer, experts, tuple(tokens[e] for e in experts), (), routes)


def test_any_integer_may_be_a_token_id() -> None:
    """Models mark images by negative ids; -1 used to mean an empty entry."""
    geometry = Geometry(2, 8, 2)
    plain, native = RegressionPredictor(geometry), NativePredictor(geometry)
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
    prediction = NativePredictor(Geometry(2, 8, 2))
    with pytest.raises(ValueError, match="layer 2, expected 0 to 1"):
        prediction.predict(2)
    with pytest.raises(ValueError, match="expert 8, expected 0 to 7"):
        prediction.observe(LayerLoad(1, (3, 8), (1, 1)))
    with pytest.raises(ValueError, match="layer -1, expected 0 to 1"):
        prediction.native.hint(-1, (), (), 1)
    with pytest.raises(ValueError, match="a hint factor of 1 or 3"):
        prediction.native.hint(0, (), (), 2)

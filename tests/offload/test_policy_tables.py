"""The native tables against the plain ones, on real routing: the same answers to the last bit."""

import random
from pathlib import Path

import pytest

from tandem.offload.policy_tables import NATIVE_TABLES
from tandem.policy.eviction.successor import Successor
from tandem.policy.plan import Geometry, LayerLoad
from tandem.policy.prediction.foresight import Foresight
from tandem.sim.steps import LoadReader, replay_steps
from tandem.trace import RoutingTrace, read_trace

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
    plain, native = Successor(geometry), Successor(geometry, tables=NATIVE_TABLES)
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
                assert native.worth(keys) == plain.worth(keys)


@pytest.mark.parametrize("batch", [1, 5])
def test_predictions_foresee_alike(trace: RoutingTrace, batch: int) -> None:
    draw, geometry = random.Random(batch), trace.meta.geometry
    plain, native = Foresight(geometry), Foresight(geometry, tables=NATIVE_TABLES)
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


def test_any_integer_may_be_a_token_id() -> None:
    """Models mark images by negative ids; -1 was what an empty place said."""
    geometry = Geometry(2, 8, 2)
    plain, native = Foresight(geometry), Foresight(geometry, tables=NATIVE_TABLES)
    for step, token in enumerate([-1, 1023, -200, -1, 824, -1, 2**40, -(2**40)] * 3):
        for foresight in (plain, native):
            foresight.begin_step([token])
            foresight.observe(LayerLoad(0, (step % 4, 4 + step % 3), (1, 1)))
        for layer in range(2):
            expected, actual = plain.predict(layer), native.predict(layer)
            assert expected is not None
            assert actual is not None
            assert list(actual.scores) == list(expected.scores)


def test_numbers_that_do_not_exist_are_refused() -> None:
    table = NATIVE_TABLES.successor(Geometry(2, 8, 2), 1)
    with pytest.raises(ValueError, match="expert 8, expected 0 to 7"):
        table.note(LayerLoad(1, (3, 8), (1, 1)), 1, (3, 8), ())
    tables = NATIVE_TABLES.foresight(Geometry(2, 8, 2))
    with pytest.raises(ValueError, match="layer 2, expected 0 to 1"):
        tables.scores(2, (), ())

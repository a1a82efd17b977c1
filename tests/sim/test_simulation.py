"""Tests of whole simulations on parts of real traces: keys, dumps, bounds, documented results."""

import dataclasses
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.core.errors import ConfigError
from tandem.hardware.profiles import load_profile, profile_names, shape_for
from tandem.policy.plan import Geometry
from tandem.policy.settings import PlannerSettings
from tandem.sim.compare import compare, table
from tandem.sim.picture import Chart, svg
from tandem.sim.simulation import Conditions, hit_rates, run_timed, simulate
from tandem.sim.start import SIMULATED_STARTS
from tandem.sim.systems import TANDEM
from tandem.trace import RoutingTrace, read_trace

TRACES = Path(__file__).parents[2] / "data" / "traces"
LRU = PlannerSettings(eviction="lru")


@pytest.fixture(
    scope="module", params=["deepseek-v2-lite", pytest.param("gpt-oss-20b", marks=pytest.mark.slow)]
)
def trace(request: pytest.FixtureRequest) -> RoutingTrace:
    return read_trace(TRACES / f"{request.param}.npz")


def conditions(hardware: str = "dali-testbed", **changes: Any) -> Conditions:
    start = Conditions(profile=load_profile(hardware), gpu_experts=0.25, limit=400)
    return dataclasses.replace(start, **changes)


def test_the_report_has_every_key(trace: RoutingTrace) -> None:
    result = simulate(trace, TANDEM, conditions())
    assert result["tokens"] >= 400
    assert 0 < result["lru_hit_rate"] < result["hit_rate"] < result["belady_hit_rate"] < 1
    assert result["prefetch"]["useful"] <= result["prefetch"]["issued"]
    assert result["decode_tokens_per_second"] > 0
    assert result["prefill_tokens_per_second"] > 0
    assert all(0 < share <= 1 for share in result["busy"].values())
    assert result["plan_over_optimal"]["mean"] < 0.005
    assert 0 <= result["plan_over_optimal"]["executed_overlapped_mean"] < 0.005
    assert json.loads(json.dumps(result)) == result


def test_a_dump_is_enough_to_recompute_the_numbers(trace: RoutingTrace) -> None:
    stream = io.StringIO()
    result = simulate(trace, PlannerSettings(), conditions(limit=60), dump_to=stream)
    header, *lines = map(json.loads, stream.getvalue().splitlines())
    demand = [line for line in lines if line["run"] == "demand"]
    resident: set[tuple[int, int]] = set()
    hits = demands = 0
    for line in demand:
        active = {(line["layer"], expert) for expert in line["experts"]}
        assert {(line["layer"], e) for e in line["hits"]} == active & resident
        hits += len(active & resident)
        demands += len(active)
        for newcomer, victim in line["changes"]:
            assert tuple(newcomer) in active
            resident.add(tuple(newcomer))
            if victim is not None:
                resident.remove(tuple(victim))
        assert len(resident) <= header["slots"]
    assert hits / demands == result["hit_rate"]
    timed = [line for line in lines if line["run"] == "timed"]
    for line in timed:
        runs = [*line["gpu"], *line["arriving"], *line["cpu"], *(c[1] for c in line["fetch"])]
        assert sorted(runs) == line["experts"]
    copies = sum(len(line[k]) for line in timed for k in ("fetch", "insert", "prefetch"))
    assert copies * header["costs"]["expert_bytes"] == result["bytes_fetched"]


def on_machines(*values: float) -> list[Any]:
    """Return parameters for each machine; all but two machines are marked slow."""
    return [
        pytest.param(
            name, *values, marks=() if name in ("desktop-16gb", "laptop-8gb") else pytest.mark.slow
        )
        for name in profile_names()
        if name not in ("desktop-24gb", "ddr4-12gb")  # which differ from others in sizes alone
    ]


@pytest.mark.parametrize("hardware", on_machines())
def test_never_slower_than_lru_that_inserts_every_miss(trace: RoutingTrace, hardware: str) -> None:
    given = conditions(hardware, limit=250, compare_every=0)
    ours = run_timed(trace, PlannerSettings(), given).decode_tokens_per_second()
    assert ours >= run_timed(trace, LRU, given).decode_tokens_per_second()


@pytest.mark.parametrize(("hardware", "gpu_experts"), [*on_machines(0.25), ("collab-testbed", 0.5)])
def test_prefetch_is_never_slower_than_none(
    trace: RoutingTrace, hardware: str, gpu_experts: float
) -> None:
    given = conditions(hardware, gpu_experts=gpu_experts, limit=150, compare_every=0)
    without = run_timed(trace, PlannerSettings(), given).decode_tokens_per_second()
    assert run_timed(trace, TANDEM, given).decode_tokens_per_second() >= without * (1 - 1e-6)


@pytest.mark.slow
def test_hints_of_a_gate_ahead_bring_speed_as_far_as_they_are_right(trace: RoutingTrace) -> None:
    start = trace.sequences(0, 20)
    draw = np.random.default_rng(0)
    random_experts = draw.integers(0, trace.meta.n_experts, start.experts.shape)

    def speed(accuracy: float) -> float:
        is_right = draw.random(start.experts.shape) < accuracy
        predicted = np.where(is_right, start.experts, random_experts.astype(np.uint8))
        meta = dataclasses.replace(start.meta, predictors=("residual",))
        hinted = dataclasses.replace(start, predicted=predicted[:, :, None, :], meta=meta)
        return run_timed(hinted, TANDEM, given).decode_tokens_per_second()

    given = conditions(compare_every=0, limit=250)
    without = run_timed(start, TANDEM, given).decode_tokens_per_second()
    assert speed(0.0) > without * 0.999
    assert without < speed(0.6) < speed(0.95)


@pytest.mark.parametrize("batch", [1, 8, pytest.param(32, marks=pytest.mark.slow)])
def test_plans_are_within_two_percent_of_the_optimum(trace: RoutingTrace, batch: int) -> None:
    given = conditions(gpu_experts=0.5, batch=batch, limit=60 * batch, compare_every=7)
    tally = run_timed(trace, PlannerSettings(), given)
    for over in (tally.over_optimal, tally.overlapped_over_optimal):  # answered, executed
        assert min(over) >= -1e-9
        assert sum(over) / len(over) <= 0.005


def test_held_out_sequences_are_not_replayed(trace: RoutingTrace) -> None:
    whole = hit_rates(trace, LRU, conditions())
    start = trace.sequences(0, trace.num_sequences - 30)
    cut = hit_rates(trace, LRU, conditions(hold_out=30, batch=64))
    assert cut == hit_rates(start, LRU, conditions(batch=64))
    assert whole != cut
    with pytest.raises(ConfigError, match="hold_out is 500; expected less than"):
        hit_rates(trace, LRU, conditions(hold_out=500))


@pytest.mark.parametrize("name", SIMULATED_STARTS.names())
@pytest.mark.parametrize("pool", ["by-layer", "shared"])
def test_starts_fill_no_set_above_its_size(trace: RoutingTrace, name: str, pool: str) -> None:
    geometry = trace.meta.geometry
    sizes = PlannerSettings(pool=pool).set_sizes(geometry, 100)
    keys = SIMULATED_STARTS.factory(name)(geometry, sizes, trace)
    assert len(set(keys)) == len(keys) <= 100
    if pool == "by-layer" and name != "first-layers":
        per_layer = Counter(key // geometry.num_experts for key in keys)
        assert all(per_layer[layer] <= size for layer, size in enumerate(sizes))


def test_a_comparison_has_every_system_and_a_picture(trace: RoutingTrace) -> None:
    speeds = compare(trace, conditions(limit=60), batches=(1, 2), fractions=(0.25,))
    assert {speed.system for speed in speeds} >= {"llama.cpp", "fiddler", "dali", "tandem"}
    assert all(speed.decode_tokens_per_second for speed in speeds)
    text = table(speeds)
    assert "| batch 1, 25% | batch 2, 25% |" in text
    picture = svg([Chart("a < b", "batch", ["1", "2"], {"x": [1.0, 2.0], "y": [0.5, 0.5]})])
    assert picture.startswith("<svg ")
    assert "a &lt; b" in picture


def test_an_unknown_model_gets_the_most_similar_shape() -> None:
    profile = load_profile("laptop-8gb")
    geometry = profile.shape("qwen3-30b-a3b")
    similar = shape_for(profile, "owner/new-moe", Geometry(40, geometry.num_experts, 8))
    assert similar.shape == "qwen3-30b-a3b"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu_experts": 1.5}, "gpu_experts is 1.5; expected a fraction in 0..1"),
        ({"gpu_experts": -0.1}, "gpu_experts is -0.1; expected a fraction in 0..1"),
        ({"batch": 0}, "batch is 0; expected a number >= 1"),
        ({"start": "warm"}, "unknown start content 'warm'"),
    ],
)
def test_conditions_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        conditions(**changes)

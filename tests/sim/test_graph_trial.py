"""Tests of the trial of steps in one graph: which sizes fetch, equal for all callers."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tandem.experts.cache.policy_tables import NATIVE_TABLES, host_slot_eviction
from tandem.hardware.profiles import load_profile, shape_for
from tandem.policy.cost import GRAPH, DiskCosts, ShapeCosts
from tandem.policy.plan import Geometry
from tandem.policy.settings import FETCHING_RULE, GRAPH_RULE, PlannerSettings
from tandem.policy.step_path import CAPTURE_SIZES, StepPath, run_path, step_path
from tandem.sim.disk import HostShare
from tandem.sim.graph_trial import settled
from tandem.sim.replay import ReplaySettings, replay
from tandem.sim.simulation import Conditions, run_timed, simulate
from tandem.sim.start import SIMULATED_STARTS
from tandem.sim.systems import TANDEM
from tandem.trace import read_trace
from tests.sim.coordinator_clock import CoordinatorClock

TRACES = Path(__file__).parents[2] / "data" / "traces"
DESKTOP = load_profile("desktop-12gb")
GEOMETRY = Geometry(6, 32, 4)
NUM_EXPERTS = GEOMETRY.num_layers * GEOMETRY.num_experts


def charged(**changes: Any) -> ShapeCosts:
    shape = dataclasses.replace(
        DESKTOP.shape("qwen3-30b-a3b"),
        num_moe_layers=GEOMETRY.num_layers,
        num_experts=GEOMETRY.num_experts,
        top_k=GEOMETRY.top_k,
    )
    return dataclasses.replace(DESKTOP.charged(shape, GRAPH), **changes)


def fetching_sizes(num_slots: int = NUM_EXPERTS // 3, **changes: Any) -> tuple[int, ...]:
    shape = charged(**changes)
    return settled(PlannerSettings(), DESKTOP, shape, GEOMETRY, num_slots).fetching_sizes


def test_steps_fetch_where_copies_cost_next_to_nothing_and_not_where_they_cost_much() -> None:
    free: dict[str, Any] = {"link_seconds_per_expert": 1e-7, "copy_wake_seconds": 0.0}
    assert fetching_sizes(**free) == CAPTURE_SIZES
    assert fetching_sizes(link_seconds_per_expert=0.1) == ()
    assert fetching_sizes(second_launch_seconds=0.1) == ()
    assert fetching_sizes(**free, second_launch_seconds=0.0) == ()  # an older profile: not known
    assert fetching_sizes(copy_wake_seconds=0.1) == ()


def test_more_rows_pay_where_fewer_do_not() -> None:
    """With more tokens there are more misses, and one copy serves several tokens."""
    assert fetching_sizes()
    assert fetching_sizes() == CAPTURE_SIZES[-len(fetching_sizes()) :]


@pytest.mark.parametrize(("share", "fetches"), [(0.0, False), (1.0, True)])
def test_over_a_disk_steps_fetch_what_memory_has(share: float, *, fetches: bool) -> None:
    """The CPU computes what comes from the disk; prefetches are not tried."""
    disk = DiskCosts(reads="direct", piece_bytes=1, depths=(1,), bytes_per_second=(7e9,))
    profile = dataclasses.replace(DESKTOP, disk=disk)
    shape = charged(link_seconds_per_expert=5e-5, copy_wake_seconds=0.0)
    usual = PlannerSettings(
        prediction="regression", prefetch_count=2, must_prefetch=False, copies_prompts=True
    )
    memory = HostShare(share=share, make_eviction=host_slot_eviction("next-use"))
    found = settled(usual, profile, shape, GEOMETRY, NUM_EXPERTS // 2, memory=memory)
    assert found.fetching_sizes == (CAPTURE_SIZES if fetches else ())
    assert found.predicting_sizes == ()


def test_nothing_is_tried_where_nothing_can_be_fetched_or_a_rule_is_requested() -> None:
    free: dict[str, Any] = {"link_seconds_per_expert": 1e-7}
    assert fetching_sizes(0, **free) == fetching_sizes(NUM_EXPERTS, **free) == ()
    for name in (GRAPH_RULE, FETCHING_RULE, "balanced"):
        requested = PlannerSettings(assignment=name)
        assert settled(requested, DESKTOP, charged(**free), GEOMETRY, NUM_EXPERTS // 3) is requested


@pytest.mark.parametrize("assignment", [None, "ready-on-gpu"])
def test_steps_copy_ahead_where_that_pays_in_slots_that_are_there(assignment: str | None) -> None:
    usual = dataclasses.replace(
        PlannerSettings(assignment=assignment), prediction="regression", prefetch_count=2,
        must_prefetch=False, copies_prompts=True,
    )  # fmt: skip

    def predicting_sizes(settings: PlannerSettings = usual, **changes: Any) -> tuple[int, ...]:
        shape = charged(**changes)
        return settled(settings, DESKTOP, shape, GEOMETRY, NUM_EXPERTS // 2).predicting_sizes

    quick: dict[str, Any] = {"link_seconds_per_expert": 5e-5}
    assert predicting_sizes(**quick) == CAPTURE_SIZES
    assert predicting_sizes(link_seconds_per_expert=0.1) == ()  # none would arrive in time
    assert predicting_sizes(**quick, copy_wake_seconds=0.1) == ()
    without_slots = dataclasses.replace(usual, copies_prompts=False)
    assert predicting_sizes(without_slots, **quick) == ()
    requested = dataclasses.replace(without_slots, must_prefetch=True)
    assert predicting_sizes(requested, link_seconds_per_expert=0.1) == CAPTURE_SIZES


def test_routers_are_run_ahead_where_that_may_be_and_pays() -> None:
    can_ask = PlannerSettings(
        assignment="ready-on-gpu", prediction="regression", prefetch_count=2, must_prefetch=False,
        can_ask=True,
    )  # fmt: skip

    def asking(settings: PlannerSettings = can_ask, **changes: Any) -> PlannerSettings:
        shape = charged(**{"link_seconds_per_expert": 5e-5, **changes})
        return settled(settings, DESKTOP, shape, GEOMETRY, NUM_EXPERTS // 2)

    found = asking()
    assert found.asking_sizes == found.predicting_sizes == CAPTURE_SIZES
    assert found.graph_rules().endswith(", look-ahead in those of 1 or 2 or 4 or 8")
    assert asking(asking_seconds=0.0).asking_sizes == ()  # an older profile: not known
    assert asking(asking_seconds=0.1).predicting_sizes == ()
    assert asking(link_seconds_per_expert=0.1).asking_sizes == ()
    others: list[dict[str, Any]] = [
        {"can_ask": False}, {"prefetch_count": 0}, {"prediction": "none"}
    ]  # fmt: skip
    for other in others:
        assert asking(dataclasses.replace(can_ask, **other)).asking_sizes == ()


def test_tables_change_no_answer() -> None:
    for settings in (PlannerSettings(), dataclasses.replace(TANDEM, copies_prompts=True)):
        parts = settings, DESKTOP, charged(), GEOMETRY, NUM_EXPERTS // 3
        assert settled(*parts, tables=NATIVE_TABLES) == settled(*parts)


def test_the_choice_is_by_tokens_and_reported_in_words() -> None:
    some = PlannerSettings(fetching_sizes=(4, 8))
    rules = [some.rule(graph_tokens=tokens) for tokens in range(1, 9)]
    assert rules == [GRAPH_RULE] * 2 + [FETCHING_RULE] * 6
    assert some.rule() == "balanced"
    assert some.graph_rules() == "balanced-in-graph of 4 or 8 tokens, ready-on-gpu of others"
    assert PlannerSettings().graph_rules() == GRAPH_RULE
    assert PlannerSettings(fetching_sizes=CAPTURE_SIZES).graph_rules() == FETCHING_RULE
    ahead = dataclasses.replace(some, predicting_sizes=(4, 8))
    assert ahead.graph_rules() == f"{some.graph_rules()}, prefetches in steps of 4 or 8 tokens"
    alone = PlannerSettings(predicting_sizes=(1,))
    assert alone.graph_rules() == "ready-on-gpu, prefetches in steps of 1 token"
    requested = dataclasses.replace(some, assignment="dali-in-graph")
    assert {requested.rule(graph_tokens=tokens) for tokens in range(1, 9)} == {"dali-in-graph"}
    assert requested.graph_rules() == "dali-in-graph"


def test_a_run_is_one_graph_wherever_its_profile_and_its_options_allow_that() -> None:
    assert run_path(DESKTOP, None) == StepPath(GRAPH, in_graph=True)
    assert run_path(DESKTOP, "look-ahead") == step_path(DESKTOP, None, "look-ahead")
    assert not run_path(load_profile("dali-testbed"), None).in_graph


@pytest.mark.parametrize("batch", [1, 8])
def test_simulate_replays_by_the_rule_of_the_trial(batch: int) -> None:
    trace = read_trace(TRACES / "gpt-oss-20b.npz")
    conditions = Conditions(
        profile=DESKTOP, gpu_experts=0.25, batch=batch, prompt=0, limit=20 * batch,
        compare_every=0, host_path=GRAPH,
    )  # fmt: skip
    settings = conditions.settled(trace, PlannerSettings())
    name = settings.rule(graph_tokens=batch)
    assert name == (FETCHING_RULE if batch == 8 else settings.rule(graph_tokens=1))
    report = simulate(trace, PlannerSettings(), conditions)
    assert report["assignment"] == name
    requested = run_timed(trace, PlannerSettings(assignment=name), conditions)
    assert report["decode_tokens_per_second"] == requested.decode_tokens_per_second()


@pytest.mark.parametrize("batch", [1, 4, 8])
@pytest.mark.parametrize(
    ("machine", "predicting_sizes"),
    [
        pytest.param("laptop-8gb", (), marks=pytest.mark.slow),
        ("desktop-12gb", ()),
        ("desktop-16gb", CAPTURE_SIZES),
    ],
)
@pytest.mark.parametrize(
    "name", ["deepseek-v2-lite", pytest.param("gpt-oss-20b", marks=pytest.mark.slow)]
)
def test_a_forecast_is_what_captured_steps_take_with_their_copies_in_their_order(
    name: str, machine: str, predicting_sizes: tuple[int, ...], batch: int
) -> None:
    trace, profile = read_trace(TRACES / f"{name}.npz"), load_profile(machine)
    geometry = trace.meta.geometry
    shape = profile.charged(shape_for(profile, trace.meta.model, geometry), GRAPH)
    settings = PlannerSettings(
        assignment=FETCHING_RULE, prediction="regression", prefetch_count=2,
        predicting_sizes=predicting_sizes,
    )  # fmt: skip
    num_slots = geometry.num_layers * geometry.num_experts // 4
    run = ReplaySettings(
        settings=settings, profile=profile, shape=shape, num_slots=num_slots, batch=batch,
        prompt=0, limit=100 * batch, compare_every=0, in_graph=True, tables=NATIVE_TABLES,
    )  # fmt: skip
    sizes = settings.set_sizes(geometry, num_slots)
    resident = SIMULATED_STARTS.factory("random")(geometry, sizes, None)
    forecast, took = (
        replay(trace, run, resident=resident, clock=clock).decode_seconds
        for clock in (None, CoordinatorClock(profile, shape))
    )
    assert forecast == pytest.approx(took, rel=0.02)

"""Tests that the engine on the virtual clock and the simulator make equal decisions."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tandem.experts.cache.expert_cache import Machine
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.experts.store.host_store import HostStore
from tandem.experts.tracing.cache_statistics import CacheStatistics
from tandem.experts.tracing.events import LayerExecuted
from tandem.hardware.profiles import load_profile, profile_names, shape_for
from tandem.policy.assignment import ASSIGNMENTS
from tandem.policy.cost import GRAPH
from tandem.policy.eviction import EVICTIONS
from tandem.policy.plan import LayerLoad, LayerPlan
from tandem.policy.settings import PlannerSettings
from tandem.policy.step_path import CAPTURE_SIZES
from tandem.sim.replay import ReplaySettings, Tally, replay
from tandem.sim.start import SIMULATED_STARTS
from tandem.sim.steps import LoadReader, Step, replay_steps
from tandem.sim.systems import TANDEM, SimulatedSettings
from tandem.trace import RoutingTrace, read_trace
from tests.experts.machines import FUNCTIONS, HIDDEN, make_executor, make_store

# Of machines that differ only in sizes one is enough.
MACHINES = [name for name in profile_names() if name not in ("desktop-24gb", "ddr4-12gb")]
TRACES = Path(__file__).parents[2] / "data" / "traces"
STEPS = 40
LONG_PROMPTS = dataclasses.replace(TANDEM, copies_prompts=True)
DALI = SimulatedSettings(
    assignment="dali",
    eviction="dali-window",
    prediction="transitions",
    prefetch="top-k",
    prefetch_count=2,
)


@pytest.fixture(scope="module")
def trace() -> RoutingTrace:
    whole = read_trace(TRACES / "deepseek-v2-lite.npz")
    return dataclasses.replace(
        whole,
        meta=dataclasses.replace(whole.meta, n_moe_layers=6),
        experts=whole.experts[:, :6],
        weights=None if whole.weights is None else whole.weights[:, :6],
        predicted=None,
    )


@pytest.fixture(scope="module")
def store(trace: RoutingTrace) -> HostStore:
    return make_store(trace.meta.geometry)


def machine_of(name: str, trace: RoutingTrace) -> Machine:
    profile = load_profile(name)
    return Machine(profile, shape_for(profile, trace.meta.model, trace.meta.geometry))


def start_of(trace: RoutingTrace, settings: PlannerSettings, num_slots: int) -> list[int]:
    sizes = settings.set_sizes(trace.meta.geometry, num_slots)
    return SIMULATED_STARTS.factory("random")(trace.meta.geometry, sizes, None)


def known_of(trace: RoutingTrace, step: Step) -> list[LayerLoad]:
    """Return the loads of a step's layers that are routed by token."""
    reader = LoadReader(trace)
    return reader.known(reader.loads(step))


def live(
    executor: HybridExecutor, trace: RoutingTrace, batch: int, prompt: int
) -> tuple[CacheStatistics, list[LayerPlan]]:
    """Run the trace's first steps through the executor."""
    statistics, plans = CacheStatistics(), list[LayerPlan]()

    def note(event: LayerExecuted) -> None:
        assert event.plan is not None
        plans.append(event.plan)

    executor.listeners += [statistics, note]
    for number, step in enumerate(replay_steps(trace, batch, prompt=prompt)):
        if number == STEPS:
            break
        ids = [] if trace.token_ids is None else trace.token_ids[step.tokens].tolist()
        executor.expect(known_of(trace, step))
        executor.begin_step(ids, is_prefill=step.is_prefill)
        hidden = torch.randn(len(step.tokens), HIDDEN)
        for layer in range(trace.meta.n_moe_layers):
            index = torch.from_numpy(trace.experts[step.tokens, layer].astype("int64"))
            weights = torch.full(index.shape, 0.125)
            if trace.weights is not None:
                weights = torch.from_numpy(trace.weights[step.tokens, layer]).float()
            executor.execute(layer, hidden, index, weights, FUNCTIONS)
    return statistics, plans


def simulated(
    trace: RoutingTrace,
    machine: Machine,
    settings: PlannerSettings,
    num_slots: int,
    batch: int,
    prompt: int = 8,
    *,
    in_graph: bool = False,
) -> tuple[Tally, list[LayerPlan]]:
    plans: list[LayerPlan] = []
    steps = list(replay_steps(trace, batch, prompt=prompt))[:STEPS]
    run = ReplaySettings(
        settings=settings,
        profile=machine.profile,
        shape=machine.shape,
        num_slots=num_slots,
        batch=batch,
        prompt=prompt,
        limit=sum(len(step.tokens) for step in steps),
        compare_every=0,
        in_graph=in_graph,
    )
    tally = replay(
        trace,
        run,
        resident=start_of(trace, settings, num_slots),
        watch=lambda step, load, plan, compared, rule, now: plans.append(plan),
    )
    return tally, plans


def check_same(
    store: HostStore,
    trace: RoutingTrace,
    machine: Machine,
    settings: PlannerSettings,
    batch: int,
    prompt: int = 8,
    *,
    in_graph: bool = False,
) -> tuple[CacheStatistics, float]:
    num_slots = trace.meta.geometry.num_layers * trace.meta.geometry.num_experts // 3
    executor = make_executor(
        store,
        num_slots,
        settings,
        machine=machine,
        geometry=trace.meta.geometry,
        resident=start_of(trace, settings, num_slots),
        in_graph=in_graph,
    )
    statistics, plans = live(executor, trace, batch, prompt)
    tally, expected = simulated(
        trace, machine, settings, num_slots, batch, prompt, in_graph=in_graph
    )
    clock = executor.cache.clock
    assert len(plans) == STEPS * trace.meta.n_moe_layers
    assert plans == expected
    assert (statistics.active, statistics.hits, statistics.copies) == (
        tally.demands,
        tally.hits,
        tally.copies,
    )
    assert (statistics.prefetch_issued, statistics.prefetch_useful) == (
        tally.prefetch_issued,
        tally.prefetch_useful,
    )
    assert (clock.now, clock.cpu_busy, clock.gpu_busy, clock.link_busy) == (
        tally.total_seconds,
        tally.cpu_busy_seconds,
        tally.gpu_busy_seconds,
        tally.link_busy_seconds,
    )
    return statistics, clock.now


@pytest.mark.parametrize("hardware", MACHINES)
@pytest.mark.parametrize("batch", [1, 4])
def test_same_plans_and_times_on_every_profile(
    store: HostStore, trace: RoutingTrace, hardware: str, batch: int
) -> None:
    statistics, _ = check_same(store, trace, machine_of(hardware, trace), TANDEM, batch)
    assert 0 < statistics.hits < statistics.active


@pytest.mark.parametrize("hardware", ["laptop-8gb", "desktop-12gb"])
@pytest.mark.parametrize(("batch", "fetches"), [(1, False), (1, True), (4, True), (8, True)])
def test_same_plans_and_times_in_one_graph(
    store: HostStore, trace: RoutingTrace, hardware: str, batch: int, fetches: bool
) -> None:
    machine = machine_of(hardware, trace)
    machine = Machine(machine.profile, machine.profile.charged(machine.shape, GRAPH))
    settings = dataclasses.replace(TANDEM, fetching_sizes=CAPTURE_SIZES if fetches else ())
    _, seconds = check_same(store, trace, machine, settings, batch, in_graph=True)
    _, planned = check_same(store, trace, machine, settings, batch)
    assert seconds != planned


def test_a_long_prompt_is_copied_ahead_of_its_routers(
    store: HostStore, trace: RoutingTrace
) -> None:
    """The copies use slots of their own, which later tokens do not see."""
    machine = machine_of("desktop-12gb", trace)
    statistics, _ = check_same(store, trace, machine, LONG_PROMPTS, 4, prompt=100)
    short, _ = check_same(store, trace, machine, LONG_PROMPTS, 4)
    assert statistics.prefetch_issued > short.prefetch_issued + trace.meta.n_moe_layers
    assert statistics.prefetch_useful > 0


@pytest.mark.parametrize("eviction", EVICTIONS.names())
def test_same_plans_for_every_eviction(
    store: HostStore, trace: RoutingTrace, eviction: str
) -> None:
    settings = dataclasses.replace(DALI, eviction=eviction)
    statistics, _ = check_same(store, trace, machine_of("dali-testbed", trace), settings, 4)
    assert statistics.prefetch_issued > 0


@pytest.mark.parametrize("assignment", ASSIGNMENTS.names())
def test_same_plans_for_every_assignment(
    store: HostStore, trace: RoutingTrace, assignment: str
) -> None:
    settings = dataclasses.replace(DALI, assignment=assignment)
    check_same(store, trace, machine_of("laptop-8gb", trace), settings, 4)


@pytest.mark.parametrize("hardware", MACHINES)
@pytest.mark.parametrize("batch", [1, 4])
def test_never_slower_than_the_cpu_alone_or_fetching_on_demand(
    store: HostStore, trace: RoutingTrace, hardware: str, batch: int
) -> None:
    machine = machine_of(hardware, trace)
    _, seconds = check_same(store, trace, machine, TANDEM, batch)
    num_slots = trace.meta.geometry.num_layers * trace.meta.geometry.num_experts // 3
    for assignment in ("cpu-only", "gpu-only"):
        alone = PlannerSettings(assignment=assignment, eviction="lru", never_worse_than_cpu=False)
        tally, _ = simulated(trace, machine, alone, num_slots, batch)
        assert seconds <= tally.total_seconds, assignment


@pytest.mark.parametrize(
    ("settings", "prompt", "in_graph"),
    [(TANDEM, 8, False), (LONG_PROMPTS, 100, False), (LONG_PROMPTS, 8, True)],
)
def test_what_layers_by_token_use_is_copied_ahead_in_both(
    store: HostStore, trace: RoutingTrace, settings: PlannerSettings, prompt: int, *, in_graph: bool
) -> None:
    """All these copies are used, and the run is not slower than without them."""
    machine = machine_of("desktop-16gb", trace)
    known = dataclasses.replace(trace, meta=dataclasses.replace(trace.meta, by_token=(0, 1, 2)))
    statistics, seconds = check_same(store, known, machine, settings, 4, prompt, in_graph=in_graph)
    before, usual = check_same(store, trace, machine, settings, 4, prompt, in_graph=in_graph)
    assert seconds < usual
    assert statistics.hits > before.hits
    assert statistics.prefetch_useful > before.prefetch_useful

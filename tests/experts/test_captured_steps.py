"""Tests of captured decode steps between planned prompts: one expert cache, the CPU's bits."""

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tandem.core.errors import ExecutionError
from tandem.experts.cache.native_predictor import NativePredictor
from tandem.experts.execution import captured_steps
from tandem.experts.execution.device import DeviceLostError
from tandem.experts.execution.executor import CpuExecutor
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.experts.store.host_store import HostStore
from tandem.experts.tracing.cache_statistics import CacheStatistics
from tandem.experts.tracing.events import LayerExecuted
from tandem.kernels.dense import CpuThreads
from tandem.policy.assignment import IN_GRAPH
from tandem.policy.settings import PlannerSettings
from tests.experts.captured import SLOW_CPU, native_layers, sure_of_predictions
from tests.experts.machines import FUNCTIONS, GEOMETRY, make_real_executor, route
from tests.experts.twin_steps import TwinSteps
from tests.policy.integrity import check_integrity

NUM_EXPERTS = GEOMETRY.num_layers * GEOMETRY.num_experts


@pytest.fixture(params=IN_GRAPH)
def executor(store: HostStore, request: pytest.FixtureRequest) -> Iterator[HybridExecutor]:
    cpu = 2e-5 if request.param == "ready-on-gpu" else SLOW_CPU
    settings = PlannerSettings(assignment=request.param)
    executor = make_real_executor(store, 8, settings, cpu=cpu)
    threads = CpuThreads(num_threads=1)
    executor.captured = TwinSteps(executor.cache, native_layers(store), threads, torch.float32)
    yield executor
    executor.close()


def step(
    executor: HybridExecutor, store: HostStore, num_tokens: int, seed: int, *, waits: bool = False
) -> None:
    alone = CpuExecutor(store, CpuThreads(num_threads=1))
    generator = torch.Generator().manual_seed(seed)
    executor.begin_step(range(num_tokens), is_prefill=num_tokens > 8)
    for layer in range(GEOMETRY.num_layers):
        call = route(num_tokens, generator)
        actual = executor.execute(layer, *call, FUNCTIONS)
        assert torch.equal(actual, alone.execute(layer, *call, FUNCTIONS))
        if waits and executor.captured is not None:  # for all copies
            executor.captured.coordinator.drain_copies()


def check_slots(executor: HybridExecutor, store: HostStore) -> None:
    """Assert that each slot holds the expert that the planner says."""
    assert executor.captured is not None
    executor.captured.leave()
    executor.cache.engine.drain()  # planned copies may still be under way
    residency, slots = executor.cache.planner.residency, executor.cache.engine.slots
    check_integrity(residency)
    for key, slot in enumerate(residency.slot_of):
        if slot >= 0:
            layer, expert = divmod(key, GEOMETRY.num_experts)
            (extent,) = store[layer].extents(expert)
            assert slots.key_in(slot) == key
            assert torch.equal(slots.memory(slot)[: len(extent.data)], extent.data)


def test_decode_steps_are_captured_and_prompts_planned(
    executor: HybridExecutor, store: HostStore
) -> None:
    events = list[LayerExecuted]()
    statistics = CacheStatistics()
    executor.listeners += [events.append, statistics]
    draw = random.Random(0)
    for seed in range(60):
        step(executor, store, draw.choice((1, 1, 1, 2, 5, 8, 12)), seed)
        if seed % 20 == 19:
            check_slots(executor, store)
            executor.resize(draw.randrange(NUM_EXPERTS))
    assert len(events) == 60 * GEOMETRY.num_layers
    for event in events:
        assert event.load is not None
        assert event.plan is not None
        fetched = [copy.expert for copy in event.plan.fetch]
        computed = [*event.plan.gpu, *event.plan.arriving, *fetched, *event.plan.cpu]
        assert sorted(computed) == [*event.load.experts]
        assert sum(event.load.tokens) == event.num_expert_rows
    assert statistics.hits > 0
    assert statistics.copies > 0


def test_a_planner_that_is_told_a_step_late_knows_every_slot(
    executor: HybridExecutor, store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is reported between steps, as while a GPU runs the next one."""
    monkeypatch.setattr(TwinSteps, "report", lambda self, listeners: None)
    draw, num_late = random.Random(1), 0
    for seed in range(60):
        step(executor, store, draw.choice((1, 1, 1, 2, 5, 8, 12)), seed, waits=True)
        num_late += executor.captured is not None and executor.captured._decided is not None
        if seed % 20 == 19:
            check_slots(executor, store)
    assert num_late > 30


@pytest.mark.parametrize("executor", IN_GRAPH[1:], indirect=True)
def test_the_device_computes_what_is_fetched_meanwhile(
    executor: HybridExecutor, store: HostStore
) -> None:
    """The cache lends slots for fetched experts; prompts get them back."""
    events, most_lent = list[LayerExecuted](), 0
    executor.listeners.append(events.append)
    residency = executor.cache.planner.residency
    for seed in range(80):
        step(executor, store, 12 if seed % 40 == 39 else 3, seed)
        most_lent = max(most_lent, len(residency.lent))
    plans = [event.plan for event in events if event.num_tokens == 3]
    assert sum(len(plan.fetch) for plan in plans if plan is not None) > 0
    assert most_lent > 0
    check_slots(executor, store)


@pytest.mark.parametrize("rule", IN_GRAPH)
def test_experts_of_the_next_layer_are_copied_ahead_and_computed_by_the_device(
    store: HostStore, rule: str
) -> None:
    """Experts that are not admitted leave after the step; planned steps continue from there."""
    settings = PlannerSettings(
        assignment=rule, prediction="regression", prefetch_count=2, predicting_sizes=(1, 2)
    )
    executor, events = make_real_executor(store, 16, settings, cpu=SLOW_CPU), list[LayerExecuted]()
    planner = executor.cache.planner
    sure_of_predictions(planner)
    threads = CpuThreads(num_threads=1)
    executor.captured = TwinSteps(executor.cache, native_layers(store), threads, torch.float32)
    executor.listeners.append(events.append)
    ahead, num_used = set[tuple[int, int]](), 0
    for seed, num_tokens in enumerate([1, 1, 2, 1, 12, 1, 4] * 12):
        events.clear()
        step(executor, store, num_tokens, seed, waits=True)
        plans = [event.plan for event in events if event.plan is not None]
        copied = {(copy.layer, copy.expert) for plan in plans for copy in plan.prefetch}
        if num_tokens == 4:
            assert not copied
        if num_tokens <= 2:
            assert all(len(plan.prefetch) <= 2 for plan in plans)
            num_used += sum((p.layer, expert) in copied for p in plans for expert in p.gpu)
            ahead |= copied
        if num_tokens == 12:
            check_slots(executor, store)
    check_slots(executor, store)
    executor.close()
    assert ahead
    assert num_used > 0


def test_what_captured_steps_have_counted_goes_on_in_planned_ones(store: HostStore) -> None:
    settings = PlannerSettings(
        assignment="ready-on-gpu", prediction="regression", prefetch_count=2, predicting_sizes=(1,)
    )
    executor = make_real_executor(store, 16, settings, cpu=SLOW_CPU)
    prediction = executor.cache.planner.prediction
    assert isinstance(prediction, NativePredictor)
    sure_of_predictions(executor.cache.planner)
    before, counts, _ = prediction.state()
    threads = CpuThreads(num_threads=1)
    executor.captured = TwinSteps(executor.cache, native_layers(store), threads, torch.float32)
    for seed in range(6):
        step(executor, store, 1, seed)
    executor.captured.leave()
    last, later, _ = prediction.state()
    assert [*before] != [*last]
    assert sum(later.seen) > sum(counts.seen)
    assert later.seen != counts.seen
    executor.close()


def test_steps_of_some_rows_fetch_and_others_do_not(store: HostStore) -> None:
    settings = PlannerSettings(fetching_sizes=(4, 8))
    executor, events = make_real_executor(store, 12, settings, cpu=SLOW_CPU), list[LayerExecuted]()
    threads = CpuThreads(num_threads=1)
    executor.captured = TwinSteps(executor.cache, native_layers(store), threads, torch.float32)
    executor.listeners.append(events.append)
    residency = executor.cache.planner.residency
    for seed, num_tokens in enumerate([4, 4, 3, 1, 2, 12, 8, 5, 1, 1, 3] * 4):
        step(executor, store, num_tokens, seed)
        if num_tokens < 3:
            assert not residency.lent  # slots are the cache's again
    check_slots(executor, store)
    executor.close()
    num_fetched = {tokens: 0 for tokens in (1, 2, 3, 4, 5, 8)}
    for event in events:
        if event.num_tokens in num_fetched and event.plan is not None:
            num_fetched[event.num_tokens] += len(event.plan.fetch)
    assert num_fetched[1] == num_fetched[2] == 0
    assert sum(num_fetched.values()) > 0


def test_python_hears_of_no_layer_in_which_nothing_was_copied(
    executor: HybridExecutor, store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, counts = executor.captured, list[int]()
    assert steps is not None
    apply = steps._apply

    def noted(layer: int, now: float, arrivals: list[Any], copies: list[Any], *more: Any) -> Any:
        counts.append(len(arrivals) + len(copies))
        return apply(layer, now, arrivals, copies, *more)

    monkeypatch.setattr(steps, "_apply", noted)
    for seed in range(20):
        step(executor, store, 1, seed)
    assert all(counts)
    executor.resize(0)
    step(executor, store, 1, 20)
    counts.clear()
    for seed in range(20):
        step(executor, store, 1, seed)
    assert not counts


def test_decode_alone_fills_the_cache(executor: HybridExecutor, store: HostStore) -> None:
    statistics = CacheStatistics()
    executor.listeners.append(statistics)
    for seed in range(40):
        step(executor, store, 1, seed)
    assert statistics.copies > 0
    assert statistics.hits > 0
    check_slots(executor, store)


def test_a_lost_step_is_a_sentence_and_the_next_is_right(
    executor: HybridExecutor, store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = executor.captured
    assert captured is not None
    is_bad = False

    def fail(layer: int) -> None:
        if is_bad and layer == 1:
            raise MemoryError("no memory")

    captured.coordinator.set_hook(fail)
    for seed in range(6):
        step(executor, store, 1, seed)
    is_bad = True
    with pytest.raises(ExecutionError, match=r"MoE layer 1 .*request is lost"):
        step(executor, store, 1, 6)
    is_bad = False
    for num_tokens in (1, 12, 1):
        step(executor, store, num_tokens, 7 + num_tokens)
    check_slots(executor, store)


def test_a_thread_that_does_not_come_back_loses_the_device(
    executor: HybridExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, a debugger has stopped the thread."""
    captured, goes_on = executor.captured, threading.Event()
    assert isinstance(captured, TwinSteps)
    executor.begin_step([1], is_prefill=False)
    monkeypatch.setattr(captured_steps, "PATIENCE_SECONDS", 0.05)
    captured._twin.set_patience(0.05)

    def stop(layer: int) -> None:
        goes_on.wait(20.0)

    captured.coordinator.set_hook(stop)
    call = route(1, torch.Generator().manual_seed(1), GEOMETRY)
    call[1][:] = torch.arange(GEOMETRY.top_k)  # not all of them resident
    with pytest.raises(
        DeviceLostError, match="did not return from a decode step; start the program"
    ):
        executor.execute(0, *call, FUNCTIONS)
    goes_on.set()
    captured.coordinator.set_hook(None)


def test_a_step_that_breaks_off_is_given_up(executor: HybridExecutor, store: HostStore) -> None:
    for num_tokens in (1, 12, 1):
        step(executor, store, 1, 0)
        executor.begin_step([1], is_prefill=False)
        call = route(1, torch.Generator().manual_seed(1))
        executor.execute(0, *call, FUNCTIONS)
        step(executor, store, num_tokens, 2)
    check_slots(executor, store)


def test_a_step_of_unknown_tokens_is_planned(executor: HybridExecutor, store: HostStore) -> None:
    for tokens in ([], [1]):
        executor.begin_step(tokens, is_prefill=False)
        assert executor.captured is not None
        assert executor.captured.is_under_way == bool(tokens)
        call = route(1, torch.Generator().manual_seed(1))
        for layer in range(GEOMETRY.num_layers):
            executor.execute(layer, *call, FUNCTIONS)

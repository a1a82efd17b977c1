"""Tests of the hybrid step: any plan gives the bits of the CPU alone."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from tandem.experts.execution.executor import CpuExecutor, Executor
from tandem.experts.store.host_store import HostStore
from tandem.experts.tracing.cache_statistics import CacheStatistics
from tandem.experts.tracing.events import LayerExecuted
from tandem.kernels.dense import CpuThreads
from tandem.policy.assignment import ASSIGNMENTS
from tandem.policy.eviction import EVICTIONS
from tandem.policy.settings import PlannerSettings
from tandem.sim.systems import POLICIES, SimulatedSettings
from tests.experts.machines import (
    FUNCTIONS,
    GEOMETRY,
    make_executor,
    make_real_executor,
    make_store,
    route,
)
from tests.policy.integrity import check_integrity

NUM_EXPERTS = GEOMETRY.num_layers * GEOMETRY.num_experts
SLOTS = (0, 1, GEOMETRY.top_k - 1, GEOMETRY.top_k, NUM_EXPERTS // 2, NUM_EXPERTS)
BATCHES = (1, 4, 16)


@pytest.fixture(scope="module")
def plain_store() -> HostStore:
    return make_store(expert_dtype=None)


def outputs(executor: Executor, batch: int, steps: int = 8) -> Iterator[torch.Tensor]:
    """Run a prompt of three tokens per sequence, then steps of one token."""
    generator = torch.Generator().manual_seed(batch)
    for step in range(steps):
        num_tokens = batch * (3 if step == 0 else 1)
        ids = torch.randint(50, (num_tokens,), generator=generator).tolist()
        executor.begin_step(ids, is_prefill=step == 0)
        for layer in range(GEOMETRY.num_layers):
            yield executor.execute(layer, *route(num_tokens, generator), FUNCTIONS)


def settings_of(
    assignment: str, eviction: str, prediction: str, prefetch: str = "top-k"
) -> PlannerSettings:
    is_on = "none" not in (prediction, prefetch)
    return SimulatedSettings(
        assignment=assignment,
        eviction=eviction,
        prediction=prediction if is_on else "none",
        prefetch=prefetch if is_on else "none",
        prefetch_count=2 if is_on else 0,
    )


def check_equal(store: HostStore, settings: PlannerSettings, num_slots: int, batch: int) -> None:
    executor = make_executor(store, num_slots, settings)
    wanted = outputs(CpuExecutor(store, CpuThreads(num_threads=1)), batch)
    for actual, expected in zip(outputs(executor, batch), wanted, strict=True):
        assert torch.equal(actual, expected), f"{settings}, {num_slots} slots, batch {batch}"
    check_integrity(executor.cache.planner.residency)


@pytest.mark.parametrize("prediction", POLICIES.predictions.names())
@pytest.mark.parametrize("assignment", ASSIGNMENTS.names())
def test_bits_equal_those_of_the_cpu_for_every_policy(
    store: HostStore, assignment: str, prediction: str
) -> None:
    """`python -m tests.experts.matrix` tests all pairs of policies, cache sizes and batches."""
    evictions, by_assignment = EVICTIONS.names(), ASSIGNMENTS.names().index(assignment)
    by_both = by_assignment + POLICIES.predictions.names().index(prediction)
    for turn in range(max(len(evictions), len(SLOTS))):
        eviction = evictions[(turn + by_both) % len(evictions)]
        batch = BATCHES[(turn + by_assignment) % len(BATCHES)]
        settings = settings_of(assignment, eviction, prediction)
        check_equal(store, settings, SLOTS[turn % len(SLOTS)], batch)


@pytest.mark.parametrize("assignment", POLICIES.assignments.names())
def test_bits_equal_those_of_the_cpu_for_plain_experts(
    plain_store: HostStore, assignment: str
) -> None:
    settings = settings_of(assignment, "next-use", "regression")
    shift = POLICIES.assignments.names().index(assignment)
    for turn, num_slots in enumerate(SLOTS):
        check_equal(plain_store, settings, num_slots, BATCHES[(turn + shift) % len(BATCHES)])


def test_every_processor_takes_part(store: HostStore) -> None:
    executor = make_executor(store, 12)
    statistics = CacheStatistics()
    executor.listeners.append(statistics)
    for _ in outputs(executor, 4, steps=60):
        pass
    assert 0 < statistics.hits < statistics.active
    assert sum(counts.fetched for counts in statistics.layers.values()) > 0
    assert 0 < statistics.device_share < 1


def test_a_resident_expert_is_a_hit_whoever_computes_it(store: HostStore) -> None:
    """The CPU also computes resident experts where that is faster."""
    executor = make_executor(store, NUM_EXPERTS + 2, resident=range(NUM_EXPERTS))
    statistics = CacheStatistics()
    executor.listeners.append(statistics)
    for _ in outputs(executor, 4):
        pass
    assert statistics.hit_rate == 1.0
    assert statistics.device_share < 1.0


def test_a_caller_that_defers_hears_the_same_a_layer_later(store: HostStore) -> None:
    """Captured steps queue the next replay first; plans, events and times do not change."""
    by_order: list[list[LayerExecuted]] = [[], []]
    for is_deferring, events in enumerate(by_order):
        executor = make_executor(store, 12)
        executor.listeners.append(events.append)
        with executor.deferring() if is_deferring else contextlib.nullcontext():
            for number, _ in enumerate(outputs(executor, 4), 1):
                assert len(events) == number - is_deferring
    assert by_order[0]
    assert [with_no_clock(event) for event in by_order[0]] == [
        with_no_clock(e) for e in by_order[1]
    ]


def with_no_clock(event: LayerExecuted) -> LayerExecuted:
    return event._replace(plan_seconds=0.0)


def test_the_cpu_begins_before_the_device_is_given_work(store: HostStore) -> None:
    executor = make_real_executor(store, 12)
    order: list[str] = []
    note_calls(executor._kernels, "start", order)
    note_calls(executor.device, "launch", order)
    num_both = 0
    for _ in outputs(executor, 4, steps=30):
        if "launch" in order and "start" in order:
            num_both += 1
            assert order[0] == "start"
        order.clear()
    executor.close()
    assert num_both > 0


def note_calls(owner: object, name: str, order: list[str]) -> None:
    inner = getattr(owner, name)

    def noted(*args: object) -> object:
        order.append(name)
        return inner(*args)

    setattr(owner, name, noted)

"""Tests of the hybrid executor on the wall clock: threads, faults, interruptions, resizing."""

import random
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from tandem.core.errors import ExecutionError
from tandem.experts.cache.sizing import OutOfDeviceMemoryError
from tandem.experts.execution.executor import CpuExecutor
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.experts.store.host_store import HostStore
from tandem.experts.tracing.cache_statistics import CacheStatistics
from tandem.kernels.dense import CpuThreads
from tandem.policy.plan import Copy
from tandem.policy.settings import PlannerSettings
from tandem.sim.systems import SimulatedSettings
from tests.experts.faults import Disturbance, FaultyDevice
from tests.experts.machines import (
    GEOMETRY,
    make_executor,
    make_real_executor,
)
from tests.experts.stress import stress
from tests.experts.test_hybrid_executor import outputs
from tests.policy.integrity import check_integrity

NUM_EXPERTS = GEOMETRY.num_layers * GEOMETRY.num_experts
LOOK_AHEAD = SimulatedSettings(
    assignment="gpu-only", eviction="lru", prediction="transitions", prefetch="top-k",
    prefetch_count=2, never_worse_than_cpu=False,
)  # fmt: skip

Make = Callable[..., HybridExecutor]


def our_threads() -> dict[int | None, str]:
    return {t.ident: t.name for t in threading.enumerate() if t.name.startswith("tandem-")}


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = our_threads()  # of other tests' models that were not collected yet
    yield
    assert our_threads().items() <= before.items()


def check(executor: HybridExecutor, store: HostStore, batch: int = 2, steps: int = 12) -> None:
    expected = outputs(CpuExecutor(store, CpuThreads(num_threads=1)), batch, steps)
    for actual, wanted in zip(outputs(executor, batch, steps), expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("is_unordered", [False, True])
@pytest.mark.parametrize("settings", [PlannerSettings(), LOOK_AHEAD], ids=["default", "gpu"])
def test_bits_equal_those_of_the_cpu(
    store: HostStore, settings: PlannerSettings, is_unordered: bool
) -> None:
    disturbance = Disturbance(random.Random(1), 1e-4, is_unordered)
    executor = make_real_executor(store, 8, settings, disturbance=disturbance)
    statistics = CacheStatistics()
    executor.listeners.append(statistics)
    check(executor, store)
    assert statistics.copies > 0
    executor.close()


class FailOnce:
    """Raises an error at its n-th call."""

    def __init__(self, error: BaseException, after: int) -> None:
        self.error, self.left = error, after

    def __call__(self, copy: Copy | None = None) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


def test_an_error_on_the_link_fails_one_request_and_leaves_the_engine_usable(
    store: HostStore,
) -> None:
    fault = FailOnce(OSError("the bus is gone"), after=9)
    disturbance = Disturbance(random.Random(1), fault=fault)
    executor = make_real_executor(store, 8, LOOK_AHEAD, disturbance=disturbance)
    with pytest.raises(ExecutionError, match=r"MoE layer \d could not be computed .*the bus is go"):
        check(executor, store)
    check(executor, store)
    executor.close()


@pytest.mark.parametrize("make", [make_executor, make_real_executor])
def test_an_error_on_the_device_fails_one_request_and_leaves_the_engine_usable(
    store: HostStore, make: Make
) -> None:
    executor = make(store, 8, LOOK_AHEAD)
    assert isinstance(executor.device, FaultyDevice)
    executor.device.fault = FailOnce(RuntimeError("a bit fell over"), after=7)
    with pytest.raises(ExecutionError, match=r"a bit fell over\); the request is lost"):
        check(executor, store)
    check(executor, store)
    executor.close()


def test_control_c_in_the_middle_leaves_the_engine_usable(store: HostStore) -> None:
    executor = make_real_executor(store, 8, LOOK_AHEAD, bytes_per_second=1e8)
    synchronize = executor.device.synchronize
    interrupt = FailOnce(KeyboardInterrupt(), after=3)

    def interrupted() -> None:
        interrupt()
        synchronize()

    executor.device.synchronize = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        check(executor, store)
    executor.device.synchronize = synchronize  # type: ignore[method-assign]
    check(executor, store)
    executor.close()


@pytest.mark.parametrize("make", [make_executor, make_real_executor])
def test_no_memory_for_work_shrinks_the_cache_and_goes_on(store: HostStore, make: Make) -> None:
    executor = make(store, 10, LOOK_AHEAD)
    assert isinstance(executor.device, FaultyDevice)
    executor.device.fault = FailOnce(OutOfDeviceMemoryError("no room"), after=5)
    check(executor, store)
    assert executor.cache.num_slots == 9
    executor.close()


def test_a_cache_that_does_not_fit_becomes_as_large_as_it_can(store: HostStore) -> None:
    slot_bytes = store[0].image_bytes
    executor = make_executor(store, 8, device_bytes=10 * slot_bytes)
    executor.resize(16)
    check(executor, store)
    assert 8 <= executor.cache.num_slots <= 10
    assert executor.device.memory().free_bytes == (10 - executor.cache.num_slots) * slot_bytes


@pytest.mark.parametrize("make", [make_executor, make_real_executor])
def test_size_changes_between_steps_keep_the_best_experts(store: HostStore, make: Make) -> None:
    executor = make(store, 16, PlannerSettings(eviction="lfu"))
    for num_slots in (16, 4, 0, 1, NUM_EXPERTS, 9):
        executor.resize(num_slots)
        check(executor, store)
        assert executor.cache.num_slots == num_slots
        check_integrity(executor.cache.planner.residency)
    executor.resize(NUM_EXPERTS)
    check(executor, store, steps=40)
    before = executor.cache.resident()
    executor.cache.resize(8)
    assert set(executor.cache.resident()) <= set(before)
    executor.close()


def test_a_short_stress_ends_well() -> None:
    """A longer run: `python -m tests.experts.stress`."""
    assert stress(seconds=5.0, seed=1).steps > 12

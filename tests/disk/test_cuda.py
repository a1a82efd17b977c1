"""Tests of device `cuda` over host slots over a disk, on CPU twins: the bits of memory."""

import errno
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
import tests.threaded  # noqa: F401  makes the device known
from tandem.core.errors import ExecutionError
from tandem.devices.cuda import copies
from tandem.experts.cache.host_slots import HostSlots
from tandem.experts.execution.executor import CpuExecutor
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.experts.store.host_store import HostStore
from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads
from tandem.policy.assignment import IN_GRAPH
from tandem.policy.eviction import IN_HOST_SLOTS
from tandem.policy.plan import LayerLoad, LayerPlan
from tandem.policy.reads import IN_SLOT, ON_DISK
from tandem.policy.residency import READY
from tandem.policy.settings import PlannerSettings
from tests.disk.loading import memory_for, packed_model, put_on_disk, slots_of, with_share
from tests.disk.test_architectures import KINDS, outputs_of
from tests.disk.test_failed_reads import CUT, DAMAGED
from tests.disk.twin_gpu import NativeKernels, twin_gpu
from tests.experts.captured import TwinMachine, fetching_policy, random_step
from tests.experts.driver_library import DriverLibrary
from tests.experts.lazy_streams import LazyStreams
from tests.experts.machines import FUNCTIONS, GEOMETRY, HIDDEN, make_executor, make_store, route
from tests.experts.test_coordinator import check, expected
from tests.experts.test_cuda import SETTINGS, make_twin
from tests.inside import runtime_in

NUM_EXPERTS = GEOMETRY.num_layers * GEOMETRY.num_experts
SHARES = [0.0, 0.4]


def run(executor: HybridExecutor, streams: LazyStreams, in_memory: HostStore) -> bool:
    """Run a prompt and steps; tell whether all results are bit-identical to the CPU's."""
    alone = CpuExecutor(in_memory, CpuThreads(num_threads=1))
    generator, pairs = torch.Generator().manual_seed(7), []
    for step in range(12):
        num_tokens = 12 if step == 0 else 3
        executor.begin_step(list(range(num_tokens)), is_prefill=step == 0)
        for layer in range(GEOMETRY.num_layers):
            call = route(num_tokens, generator)
            found = executor.execute(layer, *call, FUNCTIONS)
            pairs.append((found, alone.execute(layer, *call, FUNCTIONS)))
    streams.synchronize()
    return all(torch.equal(found, expected) for found, expected in pairs)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s.assignment}-{s.eviction}")
def test_planned_copies_come_out_of_host_slots(
    settings: PlannerSettings, share: float, tmp_path: Path
) -> None:
    for seed in range(3):
        store, streams = make_store(), LazyStreams(seed)
        slots = put_on_disk(store, tmp_path / "experts", share)
        executor = make_twin(store, streams, 6, settings, kernels=NativeKernels())
        assert run(executor, streams, make_store())
        executor.close()
        assert slots.statistics().read_bytes > 0
        require_right(store, slots)
        if settings.assignment == "gpu-only":  # host slots are free
            assert (slots.native.counts().kept > 0) == (share > 0)


def test_a_planned_step_says_what_memory_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, lacking = make_store(), Counter[bool]()
    slots = put_on_disk(store, tmp_path / "experts", 0.4)
    executor = make_executor(store, 6)
    plan = executor.cache.planner.plan

    def noted(load: LayerLoad, now: float, hints: Any, places: bytes) -> LayerPlan:
        there = {*slots.native.resident(load.layer)}
        for expert, place in zip(load.experts, places, strict=True):
            lacking[place == ON_DISK] += 1
            assert (place == IN_SLOT) == (expert in there)
        return plan(load, now, hints, places)

    monkeypatch.setattr(executor.cache.planner, "plan", noted)
    assert run(executor, LazyStreams(0), make_store())
    assert min(lacking[True], lacking[False]) > 10


def require_right(store: HostStore, slots: HostSlots) -> None:
    """Compare all experts in host slots with those of another store."""
    for layer, (host, right) in enumerate(zip(store, make_store(), strict=True)):
        for expert in slots.native.resident(layer):
            before = slots.statistics().read_bytes
            with host.hold(expert) as (extent,):
                assert torch.equal(extent.data, right.extents(expert)[0].data)
            assert slots.statistics().read_bytes == before


def test_a_copy_that_is_not_held_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this check, the test above would pass if nothing else used the same memory."""
    copy = copies.CudaCopyEngine._copy

    def letting_go(self: Any, jobs: Any, stream: Any) -> None:
        copy(self, jobs, stream)
        for job in jobs:
            job.let_go()

    monkeypatch.setattr(copies.CudaCopyEngine, "_copy", letting_go)
    found = set()
    for seed in range(10):
        store, streams = make_store(), LazyStreams(seed)
        put_on_disk(store, tmp_path / "experts", 0.0)
        executor = make_twin(store, streams, 6, SETTINGS[1], kernels=NativeKernels())
        try:
            found.add(run(executor, streams, make_store()))
        except ExecutionError:  # its memory held another expert before the copy
            found.add(False)
    assert False in found


@pytest.mark.parametrize("share", SHARES)
def test_the_coordinators_copies_come_out_of_host_slots(share: float, tmp_path: Path) -> None:
    store, in_memory, draw = make_store(), make_store(), random.Random(3)
    slots = put_on_disk(store, tmp_path / "experts", share)
    machine = TwinMachine(store, 2, num_slots=NUM_EXPERTS, most_delay=100)
    generator = torch.Generator().manual_seed(0)
    for key in draw.sample(range(NUM_EXPERTS), NUM_EXPERTS):
        machine.copy(*divmod(key, GEOMETRY.num_experts), key)
        check(machine, in_memory, random_step(2, generator))
    machine.coordinator.drain_copies()
    assert machine.coordinator.copy_error() == ""
    for key, slot in enumerate(machine.slots):
        layer, expert = divmod(key, GEOMETRY.num_experts)
        (extent,) = in_memory[layer].extents(expert)
        assert torch.equal(slot[: len(extent.data)], extent.data)
    assert slots.statistics().read_bytes > 0
    machine.close()


def test_a_thread_may_hold_all_but_one_room_and_goes_on(tmp_path: Path) -> None:
    store = make_store()
    put_on_disk(store, tmp_path / "experts", 0.0)
    held = [store[0].try_hold(expert) for expert in range(4)]
    assert [one is None for one in held] == [False, False, False, True]
    with store[1].hold(7) as (extent,):  # the last one
        assert torch.equal(extent.data, make_store()[1].extents(7)[0].data)
    for one in held[:3]:
        assert one is not None
        one.wait()  # until its read has ended, its memory is not free
        one.let_go()
    assert store[0].try_hold(3) is not None


def gpu_options(profile: str, directory: Path) -> dict[str, Any]:
    return {
        "device": "cuda", "gpu_memory": "32MB", "profile": profile, "threads": 1,
        "cache_dir": str(directory / "cache"),
    }  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_model_has_the_bits_of_memory(name: str, profile: str, tmp_path: Path) -> None:
    packed = packed_model(tmp_path, name)
    expected = outputs_of(tandem.load(packed))
    with twin_gpu(LazyStreams(is_eager=True)) as streams:
        model = with_share(packed, 0.4, **gpu_options(profile, tmp_path))
        slots, executor = slots_of(model), runtime_in(model).executor
        assert isinstance(executor, HybridExecutor)
        assert streams.pinned_bytes == slots.num_bytes
        for num_slots in (NUM_EXPERTS, 3, 0):
            executor.resize(num_slots)
            for found, right in zip(outputs_of(model), expected, strict=True):
                assert torch.equal(found, right)
        assert slots.statistics().misses > 0
        runtime_in(model).close()
        assert streams.pinned_bytes == 0


def test_a_model_that_does_not_fit_gets_slots_by_itself(
    profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = packed_model(tmp_path, "qwen3_next")
    expected = outputs_of(tandem.load(packed))
    memory = int(memory_for(packed, 0.4, has_device=True))
    for module in ("packed_reading", "disk_tier"):
        monkeypatch.setattr(f"tandem.hf.{module}.available_bytes", lambda: memory)
    monkeypatch.setattr("tandem.hf.disk_tier._RESERVED_BYTES", 0)
    monkeypatch.setattr("tandem.hf.disk_tier._RESERVED_SHARE", 0.0)
    with twin_gpu(LazyStreams(is_eager=True)) as streams:
        with pytest.warns(UserWarning, match="stay in memory"):
            model = tandem.load(packed, **gpu_options(profile, tmp_path))
        assert streams.pinned_bytes == slots_of(model).num_bytes
        for found, right in zip(outputs_of(model), expected, strict=True):
            assert torch.equal(found, right)
        executor = runtime_in(model).executor
        assert isinstance(executor, HybridExecutor)
        assert 1e-9 < executor.cache.planner.costs.read < 1.0  # measured, whatever the profile has
        runtime_in(model).close()


@pytest.mark.parametrize("may_pin", [True, False])
def test_pinned_slots_keep_their_memory(may_pin: bool, tmp_path: Path) -> None:
    """A device would continue to read pages that had been returned to the system."""
    store, streams = make_store(), LazyStreams()
    streams.may_pin = may_pin
    slots: HostSlots = put_on_disk(store, tmp_path / "experts", 1.0)
    if may_pin:
        slots.pin(streams.pin)
    else:
        with pytest.warns(UserWarning, match=r"only 0 .* could be pinned.*ulimit -l"):
            slots.pin(streams.pin)
    slots.native.use_share(0.0)
    executor = CpuExecutor(store, CpuThreads(num_threads=1))
    for seed in range(2):
        executor.execute(0, *route(40, torch.Generator().manual_seed(seed)), FUNCTIONS)
    assert len(slots.native.resident(0)) == (GEOMETRY.num_experts if may_pin else 0)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("size", [1, 2, 8])
def test_captured_steps_wait_for_the_disk(size: int, share: float, tmp_path: Path) -> None:
    store, in_memory = make_store(), make_store()
    slots = put_on_disk(store, tmp_path / "experts", share)
    slots.native.fail(0, 3, 0.01)  # some come later
    machine = TwinMachine(store, size, num_slots=4, most_delay=50)
    for slot, key in enumerate((0, 5, 9, 12)):
        machine.copy(*divmod(key, GEOMETRY.num_experts), slot)
    generator = torch.Generator().manual_seed(size)
    for padding in (0.0, 0.0, 0.3, 0.0):
        check(machine, in_memory, random_step(size, generator, padding=padding))
    records = machine.coordinator.records()
    assert [record[4] > 0 for record in records] == [True] * GEOMETRY.num_layers
    assert slots.statistics().misses > 0
    machine.close()


@pytest.mark.parametrize("rule", IN_GRAPH[1:])
def test_captured_steps_fetch_what_memory_has(rule: str, tmp_path: Path) -> None:
    """Copies come from host slots beside reads; the CPU computes experts of late reads."""
    store, in_memory = make_store(), make_store()
    slots = put_on_disk(store, tmp_path / "experts", 0.6)
    seconds = [0.02]
    machine = TwinMachine(
        store, 2, num_slots=12, policy=fetching_policy(rule, 12),
        before_copy=lambda: time.sleep(seconds[-1]),
    )  # fmt: skip
    generator, num_fetched = torch.Generator().manual_seed(1), 0
    for num_steps in range(200):
        if num_steps == 6:
            seconds.append(0.0)
        if num_steps > 20 and num_fetched > 0:  # a busy machine may be late for many steps
            break
        check(machine, in_memory, random_step(2, generator))
        num_fetched += sum(len(record[9]) for record in machine.coordinator.records())
        machine.coordinator.drain_copies()
    assert num_fetched > 0
    assert slots.statistics().device_hits > num_fetched
    assert slots.statistics().misses > 0
    machine.close()


def test_a_read_that_takes_too_long_gives_a_captured_step_up(tmp_path: Path) -> None:
    store, in_memory = make_store(), make_store()
    slots = put_on_disk(store, tmp_path / "experts", 0.0)
    machine, generator = TwinMachine(store, 1), torch.Generator().manual_seed(0)
    slots.native.fail(0, 1, 3.0)
    step = random_step(1, generator)
    with pytest.raises(_native.StepSlowError, match="delivered an expert too late"):
        machine.run(step)
    slots.native.fail(0, 0, 0.0)
    for found, right in zip(expected(store, step), expected(in_memory, step), strict=True):
        assert torch.equal(found, right)
    for _ in range(3):
        check(machine, in_memory, random_step(1, generator))
    machine.close()


@pytest.mark.parametrize(
    ("error", "message"),
    [(CUT, "ends before"), (DAMAGED, "other bytes"), (errno.EIO, "Input/output error")],
)
def test_a_failed_read_loses_a_captured_step_in_a_sentence(
    error: int, message: str, tmp_path: Path
) -> None:
    store, in_memory = make_store(), make_store()
    slots = put_on_disk(store, tmp_path / "experts", 0.4)
    machine, generator = TwinMachine(store, 1), torch.Generator().manual_seed(0)
    slots.native.fail(error, 1, 0.0)
    with pytest.raises(_native.StepLostError, match=message):
        machine.run(random_step(1, generator))
    slots.native.fail(0, 0, 0.0)
    for _ in range(3):
        check(machine, in_memory, random_step(1, generator))
    machine.close()


def test_a_failed_read_of_a_copy_is_reported_and_its_step_is_right(tmp_path: Path) -> None:
    store, in_memory = make_store(), make_store()
    slots = put_on_disk(store, tmp_path / "experts", 0.0)
    machine = TwinMachine(store, 1, num_slots=1)
    slots.native.fail(errno.EIO, 1, 0.0)
    machine.copy(0, 1, 0)
    machine.coordinator.drain_copies()
    assert "Input/output error" in machine.coordinator.copy_error()
    slots.native.fail(0, 0, 0.0)
    check(machine, in_memory, random_step(1, torch.Generator()))
    machine.close()


@pytest.mark.parametrize("name", KINDS)
def test_captured_steps_of_several_sequences_have_the_tokens_of_memory(
    name: str, profile: str, tmp_path: Path
) -> None:
    packed = packed_model(tmp_path, name)
    prompts = [[40 + i] * (3 + 20 * i) for i in range(3)]
    options = {"device": "threaded", "gpu_memory": "300KB", "profile": profile}
    model = with_share(packed, 0.4, **options)
    found, expected = (
        tandem.Generator(m).generate(prompts, max_new_tokens=12)
        for m in (model, tandem.load(packed))
    )
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert slots_of(model).statistics().misses > 0


@pytest.mark.parametrize("eviction", IN_HOST_SLOTS)
def test_what_a_device_has_is_the_first_to_leave_memory(eviction: str, tmp_path: Path) -> None:
    store = make_store()
    slots = put_on_disk(store, tmp_path / "experts", 0.5, eviction=eviction)
    executor = CpuExecutor(store, CpuThreads(num_threads=1))

    def use(*experts: int) -> set[int]:
        index = torch.tensor([[*experts]])
        weights, hidden = torch.ones(index.shape), torch.ones(1, HIDDEN)
        executor.execute(0, hidden, index, weights, FUNCTIONS)
        return {*slots.native.resident(0)}

    for _ in range(3):
        assert use(0, 1, 2) == {0, 1, 2}
    assert use(3, 1, 2) == {0, 1, 2, 3}
    states = bytearray(NUM_EXPERTS)
    states[2] = READY
    slots.native.note_on_device(bytes(states))
    assert {*slots.native.resident(0)} == {0, 1, 2, 3}
    assert use(4, 1, 3) == {0, 1, 3, 4}


@pytest.mark.parametrize("has_driver", [False, True])
def test_what_leaves_a_device_comes_back_into_memory(has_driver: bool, tmp_path: Path) -> None:
    store, in_memory = make_store(), make_store()
    slots = put_on_disk(store, tmp_path / "experts", 0.5)
    library = DriverLibrary(tmp_path) if has_driver else None
    if library is not None:
        library.reset(delay=100)
    path = None if library is None else library.path
    machine = TwinMachine(store, 1, num_slots=1, library=path)
    generator = torch.Generator().manual_seed(0)
    machine.copy(0, 1, 0)
    machine.coordinator.drain_copies()
    for expert in range(4, 8):  # whose reads reuse the copy's memory
        with store[1].hold(expert):
            pass
    slots.native.note_on_device(bytes([READY] * NUM_EXPERTS))
    machine.copy(0, 2, 0, victim=1)
    step = random_step(1, generator)
    step[0].chosen[:] = torch.tensor([0, 3, 5])
    check(machine, in_memory, step)
    machine.coordinator.drain_copies()
    assert machine.coordinator.copy_error() == ""
    assert slots.native.counts().kept == 1
    assert 1 in slots.native.resident(0)
    require_right(store, slots)
    machine.close()
    assert library is None or library.num_left == 0

"""Tests of the GPU's device and link without a GPU: their real code on `LazyStreams`."""

import pytest
import torch

from tandem.core.errors import ExecutionError
from tandem.devices.cuda.copies import CudaCopyEngine, Link
from tandem.devices.cuda.device import CudaDevice
from tandem.devices.cuda.kernels import TorchKernels
from tandem.devices.cuda.streams import Stream
from tandem.experts.cache.clock import Clock, WallClock
from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.cache.slots import Slots
from tandem.experts.execution.executor import CpuExecutor
from tandem.experts.execution.expert_kernels import ExpertKernels
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.experts.store.host_store import HostStore
from tandem.experts.store.pinning import pin_store
from tandem.experts.tracing.events import LayerExecuted
from tandem.kernels.dense import CpuThreads
from tandem.policy.plan import Copy, Geometry
from tandem.policy.settings import PlannerSettings
from tandem.sim.systems import SimulatedSettings
from tests.experts.lazy_streams import LazyEvent, LazyStreams
from tests.experts.machines import FUNCTIONS, GEOMETRY, make_machine, make_store, route
from tests.policy.integrity import check_integrity

FAST = Link(1e9)
NUM_EXPERTS = GEOMETRY.num_layers * GEOMETRY.num_experts
# Settings under which every kind of copy and every stream occurs.
SETTINGS = (
    PlannerSettings(),
    PlannerSettings(assignment="gpu-only", eviction="lru", prediction="none", prefetch="none"),
    PlannerSettings(assignment="hits-on-gpu", eviction="copy-on-miss", prediction="none"),
    SimulatedSettings(
        assignment="dali", prediction="popularity", prefetch="top-k", prefetch_count=3
    ),
)


def make_twin(
    store: HostStore,
    streams: LazyStreams,
    num_slots: int,
    settings: PlannerSettings,
    link: Link = FAST,
    kernels: TorchKernels | None = None,
) -> HybridExecutor:
    """Return a hybrid executor that runs the GPU's code on the twin's streams."""
    wall, kernels = WallClock(), kernels or TorchKernels()
    device = CudaDevice(streams, kernels, on_busy=wall.add_gpu, is_watched=wall.is_watched)

    def make_engine(
        store: HostStore, slots: Slots, geometry: Geometry, clock: Clock
    ) -> CudaCopyEngine:
        assert isinstance(clock, WallClock)
        return CudaCopyEngine(store, slots, geometry, clock, streams, device.events, link)

    machine = make_machine(cpu=2e-5, gpu=1e-5, link=2e-5, dense=1e-4)
    cache = ExpertCache(store, device, wall, GEOMETRY, machine, settings, make_engine)
    cache.resize(num_slots)
    return HybridExecutor(cache, device, ExpertKernels(CpuThreads(num_threads=1)))


def run_both(
    executor: HybridExecutor, store: HostStore, streams: LazyStreams, *, steps: int = 12
) -> None:
    """Run a prompt and steps on the twin and on the CPU; assert that all results are equal."""
    alone, generator = (
        CpuExecutor(store, CpuThreads(num_threads=1)),
        torch.Generator().manual_seed(7),
    )
    outs, expected = [], []
    for step in range(steps):
        num_tokens = 12 if step == 0 else 3
        executor.begin_step(list(range(num_tokens)), is_prefill=step == 0)
        for layer in range(GEOMETRY.num_layers):
            call = route(num_tokens, generator)
            before = streams.num_waits
            outs.append(executor.execute(layer, *call, FUNCTIONS))
            # One for the router's choice; a second if the CPU alone computed the layer.
            assert streams.num_waits - before <= 2
            expected.append(alone.execute(layer, *call, FUNCTIONS))
    streams.synchronize()
    for out, wanted in zip(outs, expected, strict=True):
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def store() -> HostStore:
    return make_store(expert_dtype=None)


@pytest.mark.parametrize("num_slots", [1, 3, 8, NUM_EXPERTS])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s.assignment}-{s.eviction}")
def test_results_are_right_in_every_order_that_events_allow(
    store: HostStore, settings: PlannerSettings, num_slots: int
) -> None:
    for seed in range(3):
        streams = LazyStreams(seed)
        executor = make_twin(store, streams, num_slots, settings)
        run_both(executor, store, streams)
        check_integrity(executor.cache.planner.residency)


def test_plans_change_the_last_bits_on_a_gpu_and_no_more() -> None:
    """Only the CPU's kernels round activations to int8; see docs/runtime.md."""
    packed, outs = make_store(), []
    call = route(3, torch.Generator().manual_seed(7))
    for assignment in ("cpu-only", "gpu-only"):
        settings = PlannerSettings(assignment=assignment, prediction="none", prefetch="none")
        streams = LazyStreams(is_eager=True)
        executor = make_twin(packed, streams, NUM_EXPERTS, settings)
        executor.cache.resize(NUM_EXPERTS, range(NUM_EXPERTS))
        outs.append(executor.execute(0, *call, FUNCTIONS))
        streams.synchronize()
    assert not torch.equal(*outs)
    assert (outs[0] - outs[1]).norm() < 2e-2 * outs[0].norm()


@pytest.mark.parametrize("forgotten", ["wait for the copy", "wait for the reader"])
def test_the_twin_notices_a_forgotten_event(
    store: HostStore, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this check, the test above could pass because the order is never random."""
    stream = Stream.COMPUTE if forgotten == "wait for the copy" else Stream.FETCH
    right = LazyStreams.wait
    monkeypatch.setattr(
        LazyStreams, "wait", lambda self, at, event: at is stream or right(self, at, event)
    )

    def run() -> None:
        for seed in range(20):
            streams = LazyStreams(seed)
            run_both(make_twin(store, streams, 8, SETTINGS[1]), store, streams)

    with pytest.raises(AssertionError, match="not close"):
        run()


def test_a_link_is_made_slower_by_pauses_and_stays_one_stream(store: HostStore) -> None:
    streams, link = LazyStreams(), Link(4e6, limit=1e6)
    executor = make_twin(store, streams, 4, SETTINGS[0], link)
    run_both(executor, store, streams)
    num_bytes = store[0].image_bytes
    assert streams.pauses
    assert streams.pauses[0] == pytest.approx(num_bytes / 1e6 - num_bytes / 4e6)
    assert Link(1e6, limit=4e6).pause_seconds(1000) == 0


def test_copies_ahead_are_held_until_the_link_needs_them_and_queued_together(
    store: HostStore,
) -> None:
    streams = LazyStreams(5)
    assert Link(1e9).most_ahead(store[0].image_bytes) > 2
    slow = make_twin(store, streams, NUM_EXPERTS, SETTINGS[0], Link(1e3)).cache.engine
    streams.num_copies.clear()
    for expert in range(6):
        slow.submit([Copy(0, expert, expert, None)], is_needed=False)
    slow.flush()
    assert streams.num_copies == [2 * len(store[0].extents(0))]  # two experts in one call
    assert slow.cancel(0, [0, 1, 4, 5]) == [4, 5]  # the queued copy completes
    arrived = set[int]()
    while len(arrived) < 4:
        arrived |= {expert for _, expert, _ in slow.arrivals()}
    assert arrived == {0, 1, 2, 3}
    # A cancelled copy's slot is free for the next one.
    slow.submit([Copy(1, 7, 4, None)], is_needed=True)
    slow.drain()
    data = store[1].extents(7)[0].data
    assert torch.equal(slow.slots.memory(4)[: len(data)], data)


def test_a_batch_that_claims_a_held_copy_has_it_queued(store: HostStore) -> None:
    streams = LazyStreams(6)
    engine = make_twin(store, streams, NUM_EXPERTS, SETTINGS[0], Link(1e3)).cache.engine
    for expert in range(4):
        engine.submit([Copy(0, expert, expert, None)], is_needed=False)
    engine.flush()
    use = engine.use([3], [3])
    (memory,) = use.images()
    seen = list[torch.Tensor]()
    streams.run(Stream.COMPUTE, lambda: seen.append(memory.clone()))
    use.end()
    streams.synchronize()
    data = store[0].extents(3)[0].data
    assert torch.equal(seen[0][: len(data)], data)


def test_processors_and_link_report_how_long_they_worked(store: HostStore) -> None:
    streams = LazyStreams(2)
    executor = make_twin(store, streams, 8, SETTINGS[1], Link(1e9))
    clock = executor.cache.clock
    clock.watchers += 1
    run_both(executor, store, streams)
    assert clock.gpu_busy > 0
    copies, seconds = round(clock.link_busy * 1e9 / store[0].image_bytes), clock.link_busy
    assert copies > 0
    assert seconds == pytest.approx(copies * store[0].image_bytes / 1e9)


def test_the_limit_on_memory_is_given_back(store: HostStore) -> None:
    streams = LazyStreams(total_bytes=1 << 30)
    device = CudaDevice(streams, TorchKernels())
    streams.limit(1 << 20)
    device.close()
    assert streams.memory().total_bytes == 1 << 30


def test_no_memory_for_the_sum_shrinks_the_cache_and_goes_on(
    store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = LazyStreams(is_eager=True)
    executor = make_twin(store, streams, NUM_EXPERTS, SETTINGS[1])
    right, failures = TorchKernels.add_rows, iter([True])

    def failing(self: TorchKernels, *args: torch.Tensor) -> None:
        if next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        right(self, *args)

    monkeypatch.setattr(TorchKernels, "add_rows", failing)
    run_both(executor, store, streams)
    assert 0 < executor.cache.num_slots < NUM_EXPERTS


def test_out_of_memory_shrinks_the_cache_and_goes_on(
    store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = LazyStreams()
    executor = make_twin(store, streams, NUM_EXPERTS, SETTINGS[0])
    right, failures = TorchKernels.prepare, iter([True])

    def failing(self: TorchKernels, batch: object, use: object) -> object:
        if next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return right(self, batch, use)  # type: ignore[arg-type]

    monkeypatch.setattr(TorchKernels, "prepare", failing)
    run_both(executor, store, streams)
    assert 0 < executor.cache.num_slots < NUM_EXPERTS


def test_a_cache_that_does_not_fit_becomes_as_large_as_it_can(store: HostStore) -> None:
    slot_bytes = store[0].image_bytes
    streams = LazyStreams(total_bytes=5 * slot_bytes)
    executor = make_twin(store, streams, NUM_EXPERTS, SETTINGS[0])
    assert 1 <= executor.cache.num_slots <= 5


def test_a_size_is_taken_without_a_layer_to_run(store: HostStore) -> None:
    executor = make_twin(store, LazyStreams(), 4, SETTINGS[0])
    executor.resize(7)
    assert executor.cache.num_slots == 4
    executor.settle()
    assert executor.cache.num_slots == 7
    executor.settle()  # nothing waits any more
    assert executor.cache.num_slots == 7


def test_rows_without_a_token_are_no_part_of_what_is_planned(store: HostStore) -> None:
    streams = LazyStreams(is_eager=True)
    executor, alone = (
        make_twin(store, streams, 6, SETTINGS[0]),
        CpuExecutor(store, CpuThreads(num_threads=1)),
    )
    generator = torch.Generator().manual_seed(4)
    events: list[LayerExecuted] = []
    executor.listeners.append(events.append)
    for step, num_tokens in enumerate((12, 4, 4, 3, 4)):  # a short prompt after such steps
        is_prefill = step in (0, 3)
        executor.begin_step([0] * num_tokens, is_prefill=is_prefill)
        for layer in range(GEOMETRY.num_layers):
            hidden, index, weights = route(num_tokens, generator)
            if not is_prefill:
                index[1] = index[3] = -1
            out = executor.execute(layer, hidden, index, weights, FUNCTIONS)
            expected = alone.execute(layer, hidden, index, weights, FUNCTIONS)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
            load = events[-1].load
            assert load is not None
            assert len(load.routes) == (num_tokens if is_prefill else 2)


def test_an_error_of_the_gpu_fails_the_request_and_says_whether_the_gpu_still_works(
    store: HostStore,
) -> None:
    streams = LazyStreams()
    executor = make_twin(store, streams, 4, SETTINGS[0])
    streams.broken = RuntimeError("CUDA error: an illegal memory access was encountered\nhints")
    with pytest.raises(ExecutionError, match=r"illegal memory access.*start it again"):
        run_both(executor, store, streams)
    streams.broken = None
    run_both(executor, store, streams)


def test_pinning_stops_at_the_limit_and_is_undone(store: HostStore) -> None:
    streams = LazyStreams()
    first = next(iter(store[0].stored().values()))
    device = CudaDevice(streams, TorchKernels(), pin_limit_bytes=first.nbytes)
    with pytest.warns(UserWarning, match=r"only .* of .* could be pinned"):
        pinned = pin_store(store, device.pin)
    assert pinned.num_bytes == streams.pinned_bytes == first.nbytes
    device.close()
    assert streams.pinned_bytes == 0


def test_a_copy_reports_once_its_bytes_are_there(store: HostStore) -> None:
    streams = LazyStreams(3)
    executor = make_twin(store, streams, 4, SETTINGS[0])
    engine = executor.cache.engine
    engine.submit([Copy(0, 5, 0, None)], is_needed=False)
    engine.flush()
    arrived = [arrival for _ in range(40) for arrival in engine.arrivals()]
    assert [(layer, expert) for layer, expert, _ in arrived] == [(0, 5)]
    piece = store[0].extents(5)[0]
    assert torch.equal(engine.slots.memory(0)[: len(piece.data)], piece.data)


def test_batches_are_timed_only_while_somebody_watches(
    store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two timed events a batch cost the host tens of microseconds per layer."""
    streams = LazyStreams(3)
    timed: list[bool] = []
    record = streams.record

    def noted(stream: Stream, *, is_timed: bool = False) -> LazyEvent:
        timed.append(is_timed)
        return record(stream, is_timed=is_timed)

    monkeypatch.setattr(streams, "record", noted)
    executor = make_twin(store, streams, NUM_EXPERTS // 2, PlannerSettings())
    clock = executor.cache.clock
    run_both(executor, store, streams, steps=4)
    assert not any(timed)
    clock.watchers += 1
    run_both(executor, store, streams, steps=4)
    assert any(timed)
    assert clock.gpu_busy >= 0

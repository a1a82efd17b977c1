"""Tests with planted mistakes that a GPU would punish late: the shadow device finds each."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.decode.cuda import graphs
from tandem.devices.cuda import hand_over_trial, signals
from tandem.devices.cuda.captures import CudaCapture, on_capture_stream
from tandem.devices.cuda.copies import SlotEvents
from tandem.devices.cuda.device import CudaDevice
from tandem.devices.cuda.driver import DriverError
from tandem.devices.cuda.hand_over_trial import Trial, TrialLimits
from tandem.devices.cuda.signals import StreamSignals
from tandem.devices.cuda.streams import CudaStreams, Stream
from tandem.experts.store.host_store import HostStore
from tandem.kernels.dense import CpuThreads
from tests.experts.machines import make_store
from tests.shadow.device import shadow_gpu
from tests.shadow.executors import make_executor, run_steps
from tests.shadow.gpu import ShadowFaultError, ShadowGpu

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def store() -> HostStore:
    return make_store(expert_dtype=None)


@pytest.fixture
def gpu() -> Iterator[ShadowGpu]:
    with shadow_gpu(kernels="none") as gpu:
        yield gpu
        gpu.faults.clear()  # each is expected


def leave_out(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    patch.setattr(owner, name, lambda *args, **kwargs: None)


def no_wait_on(stream: Stream) -> Callable[..., None]:
    right = CudaStreams.wait

    def wait(self: CudaStreams, at: Stream, event: Any) -> None:
        if at is not stream:
            right(self, at, event)

    return wait


def no_wait_for_the_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaStreams, "wait", no_wait_on(Stream.COMPUTE))


def no_wait_for_the_reader(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaStreams, "wait", no_wait_on(Stream.FETCH))


def reads_are_not_noted(patch: pytest.MonkeyPatch) -> None:
    leave_out(patch, SlotEvents, "note_read")


def a_batch_on_the_stream_of_copies(patch: pytest.MonkeyPatch) -> None:
    right = CudaStreams.run
    patch.setattr(
        CudaStreams,
        "run",
        lambda self, stream, work: right(
            self, Stream.AHEAD if stream is Stream.COMPUTE else stream, work
        ),
    )


def unpinned_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaStreams, "pinned", lambda self, count: torch.zeros(count, dtype=torch.uint8))


def a_store_that_is_not_pinned(patch: pytest.MonkeyPatch) -> None:
    def pin(self: CudaStreams, memory: Tensor) -> bool:
        self._pinned.add(memory.data_ptr(), memory.nbytes)
        return True

    patch.setattr(CudaStreams, "pin", pin)


def a_table_that_stays_on_the_host(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaDevice, "_copied", lambda self, host: host)


def a_download_that_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    right = CudaStreams.record

    class Passed:
        def __init__(self, event: Any) -> None:
            self._event = event

        def __getattr__(self, name: str) -> Any:
            return getattr(self._event, name)

        def synchronize(self) -> None:
            """Do nothing."""

    def record(self: CudaStreams, stream: Stream, *, is_timed: bool = False) -> Any:
        event = right(self, stream, is_timed=is_timed)
        return Passed(event) if stream is Stream.COMPUTE and not is_timed else event

    patch.setattr(CudaStreams, "record", record)
    patch.setattr(CudaStreams, "wait", lambda *args: None)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (no_wait_for_the_copy, "nothing orders that behind: copy .*writes on stream"),
        (no_wait_for_the_reader, "nothing orders that behind"),
        (reads_are_not_noted, "nothing orders that behind"),
        (a_batch_on_the_stream_of_copies, "nothing orders that behind"),
        (unpinned_rows, "unpinned memory"),
        (a_store_that_is_not_pinned, "unpinned memory"),
        (a_table_that_stays_on_the_host, "indices on the CPU|same device"),
        (a_download_that_is_not_waited_for, "on the host, and nothing orders that behind"),
    ],
)
def test_a_mistake_in_the_executor_is_found(
    store: HostStore,
    gpu: ShadowGpu,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    message: str,
) -> None:
    with monkeypatch.context() as patch:
        plant(patch)
        executor = make_executor(store, 4)
        with pytest.raises(Exception, match=message):
            run_steps(executor, store)
    executor.close()


def test_memory_that_goes_while_a_copy_is_at_it_is_found(gpu: ShadowGpu) -> None:
    streams = CudaStreams()
    held, host = [streams.empty(1024)], streams.pinned(1024).zero_()
    streams.run(Stream.AHEAD, partial(_copy, held, host))
    held.clear()
    assert any("is given back while stream" in fault for fault in gpu.faults)


@pytest.mark.parametrize("is_noted", [False, True])
def test_a_tensor_that_another_stream_still_reads_is_found(gpu: ShadowGpu, is_noted: bool) -> None:
    streams, found = CudaStreams(), list[Tensor]()
    read = [torch.zeros(8, device=CUDA)]
    streams.wait(Stream.AHEAD, streams.record(Stream.COMPUTE))
    streams.run(Stream.AHEAD, lambda: found.append(read[0] + 1))
    if is_noted:
        read[0].record_stream(streams._streams[Stream.AHEAD])
    read.clear()
    assert is_noted != any("is given back while stream" in fault for fault in gpu.faults)


def _copy(held: list[Tensor], host: Tensor) -> None:
    held[0].copy_(host, non_blocking=True)


def _add_to(x: Tensor) -> None:
    x.add_(1)


def in_a_capture(work: Callable[[], Any]) -> None:
    capture = CudaCapture(CUDA)
    with on_capture_stream(capture):
        capture.begin()
        try:
            work()
            capture.end()
        except BaseException:
            capture.abandon()
            raise


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x + torch.ones(4).to(CUDA),
        lambda x: torch.tensor([1, 2], device=CUDA),
    ],
    ids=["item", "tolist", "cpu", "mask", "nonzero", "a copy", "a constant"],
)
def test_a_wait_in_a_capture_or_step_is_refused(
    gpu: ShadowGpu, look: Callable[[Tensor], Any]
) -> None:
    x = torch.zeros(4, device=CUDA)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        in_a_capture(lambda: look(x))
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        look(x)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(x.cpu(), torch.zeros(4))  # and the GPU works on


def test_an_index_on_the_host_is_found(gpu: ShadowGpu) -> None:
    with pytest.raises(ShadowFaultError, match="indices on the CPU"):
        torch.zeros(4, device=CUDA)[torch.tensor([1, 2])]


def test_a_graph_that_reads_what_was_given_back_is_found(gpu: ShadowGpu) -> None:
    """A recording owns the weights it has made, so a captured step must keep the recording."""
    x = torch.ones(4, device=CUDA)

    def run(kept: list[Any]) -> list[Tensor]:
        def record_first() -> Callable[[], Tensor]:
            weight = torch.full((4,), 3.0, device=CUDA)
            return lambda: x * weight

        step = graphs.new_graphed_step(
            lambda: x * 3, 1e-2, lambda: CudaCapture(CUDA), record_first=record_first
        )
        return [step().cpu() for _ in range(5)]

    assert all(torch.equal(each, torch.full((4,), 3.0)) for each in run([]))
    right = graphs.CapturedStep.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            graphs.CapturedStep,
            "__init__",
            lambda self, segments, result, around, _, *more: right(
                self, segments, result, around, torch.Tensor, *more
            ),
        )
        with pytest.raises(ShadowFaultError, match="memory that was given back"):
            run([])


def test_a_launch_while_another_thread_captures_is_found(gpu: ShadowGpu) -> None:
    x = torch.zeros(4, device=CUDA)
    errors: list[BaseException] = []

    def other() -> None:
        try:
            x.add_(1)
        except BaseException as error:
            errors.append(error)

    def work() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    in_a_capture(work)
    assert "while another thread captures" in str(errors[0])


def test_work_on_another_stream_in_a_capture_is_found(gpu: ShadowGpu) -> None:
    """Its memory would not belong to the graph."""
    x, streams = torch.zeros(4, device=CUDA), CudaStreams()
    with pytest.raises(ShadowFaultError, match="in a capture of"):
        in_a_capture(lambda: streams.run(Stream.AHEAD, partial(_add_to, x)))


def test_an_address_of_the_gpu_for_native_code_is_found(gpu: ShadowGpu) -> None:
    rows, row_of, weights = torch.zeros(3, 4, device=CUDA), torch.zeros(1, 2), torch.zeros(1, 2)
    with pytest.raises(TypeError, match=r"rows is \(3, 4\) of float32 on a device"):
        CpuThreads(num_threads=1).engine.add_rows(rows, row_of.int(), weights, torch.zeros(1, 4))


def test_a_hand_over_that_does_not_wait_is_found_by_its_trial() -> None:
    pytest.importorskip("triton")
    with shadow_gpu() as gpu:

        class WaitsForNothing(StreamSignals):
            def wait(self, done: Tensor) -> None:
                """Do nothing."""

        class QuickStreams(CudaStreams):
            def record(self, stream: Stream, *, is_timed: bool = False) -> Any:
                gpu.worker.join()  # nothing blocks it
                return super().record(stream, is_timed=is_timed)

        driver = hand_over_trial.open_driver()  # type: ignore[attr-defined]
        assert driver is not None
        patient = TrialLimits(come_seconds=60.0)
        current = partial(_current_stream, CUDA)
        of_all = StreamSignals(driver, current)
        assert Trial(of_all, CudaStreams(), 1, limits=patient).works()
        of_none = WaitsForNothing(driver, current)
        assert not Trial(of_none, QuickStreams(), 1, limits=patient).works()


def test_a_doorbell_without_a_fence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a kernel that rings itself, `test_triton_attention.py` checks the code."""
    pytest.importorskip("triton")
    monkeypatch.setattr(signals, "_AFTER_ALL", 1)
    with shadow_gpu() as gpu:
        driver = hand_over_trial.open_driver()  # type: ignore[attr-defined]
        assert driver is not None
        word = CudaStreams().pinned(64).view(torch.int32)
        with pytest.raises(DriverError, match="returned 1"):
            StreamSignals(driver, lambda: 0).ring(word[:1])
        assert "without a fence" in gpu.faults.pop()


def test_what_a_capture_has_made_outside_its_pool_is_found(gpu: ShadowGpu) -> None:
    """Here the second capture reads a result of the first one after both were released."""
    x = torch.ones(4, device=CUDA)
    first, second = CudaCapture(CUDA), CudaCapture(CUDA)
    made, replays = [x], list[Callable[[], None]]()
    for capture in (first, second):
        with on_capture_stream(capture):
            capture.begin()
            made.append(made[-1] + 1)
            replays.append(capture.end().replay)
    made.clear()
    replays[0]()
    with pytest.raises(ShadowFaultError, match="memory that was given back"):
        replays[1]()


def _current_stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)

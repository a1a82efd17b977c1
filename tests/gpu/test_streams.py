"""Tests of CUDA on a real GPU: copies without waits, aborted captures, other GPUs."""

import pytest
import torch

from tandem.decode.cuda.graphs import new_graphed_step
from tandem.devices.cuda.batch_copy import LEAST_BYTES, find_batch_copy
from tandem.devices.cuda.captures import CudaCapture, on_capture_stream
from tandem.devices.cuda.streams import CudaStreams, HostCopy, Stream
from tests.gpu.models import IS_DRY

pytestmark = pytest.mark.skipif(IS_DRY, reason="the twins have their own tests")
PAUSE_SECONDS = 0.2


@pytest.mark.parametrize("num_bytes", [LEAST_BYTES, 40_000], ids=["one call", "one by one"])
def test_copies_do_not_wait(num_bytes: int) -> None:
    """The copy is queued after a pause on the stream; if it waited, the pause would be over."""
    streams = CudaStreams()
    host = torch.randint(256, (8 * num_bytes,), dtype=torch.uint8)
    target = streams.empty(host.nbytes)
    assert streams.pin(host)
    try:
        streams.pause(Stream.AHEAD, 1e-3)  # measures the clock
        streams.synchronize()
        streams.pause(Stream.AHEAD, PAUSE_SECONDS)
        pieces = zip(target.split(num_bytes), host.split(num_bytes), strict=True)
        streams.copy(Stream.AHEAD, [HostCopy(*piece) for piece in pieces])
        done = streams.record(Stream.AHEAD)
        assert not done.query()
        done.synchronize()
        assert torch.equal(target.cpu(), host)
    finally:
        streams.synchronize()
        streams.unpin(host)


def test_a_driver_of_cuda_12_8_copies_several_in_one_call() -> None:
    if find_batch_copy() is None:
        pytest.skip("the driver is older")
    streams = CudaStreams()
    host = torch.randint(256, (4 * LEAST_BYTES,), dtype=torch.uint8)
    target = streams.empty(host.nbytes)
    assert streams.pin(host)
    pieces = zip(target.split(LEAST_BYTES), host.split(LEAST_BYTES), strict=True)
    streams.copy(Stream.FETCH, [HostCopy(*piece) for piece in pieces])
    streams.synchronize()
    streams.unpin(host)
    assert streams._batch_copy is not None, "the driver refused"
    assert torch.equal(target.cpu(), host)


def test_a_refused_registration_breaks_nothing() -> None:
    streams = CudaStreams()
    host = torch.zeros(1 << 20, dtype=torch.uint8)
    assert streams.pin(host)
    assert not streams.pin(host)  # registered already
    assert torch.ones(4, device="cuda").sum().item() == 4
    streams.unpin(host)


def test_the_limit_on_memory_is_given_back() -> None:
    streams = CudaStreams()
    before = torch.cuda.get_per_process_memory_fraction()
    streams.limit(1 << 30)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    streams.limit(None)
    assert torch.cuda.get_per_process_memory_fraction() == before
    torch.empty(1 << 31, dtype=torch.uint8, device="cuda")


def require_a_working_gpu() -> None:
    """Assert that random numbers, the allocator and another capture work as before."""
    torch.cuda.empty_cache()
    assert torch.rand(1000, device="cuda").std().item() > 0.1
    x, capture = torch.zeros(4, device="cuda"), CudaCapture(torch.device("cuda", 0))
    with on_capture_stream(capture):
        capture.begin()
        noise = torch.rand(4, device="cuda")
        y = x + 1
        graph = capture.end()
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [5.0] * 4
    assert noise.min().item() >= 0
    torch.cuda.empty_cache()


def break_a_capture(capture: CudaCapture) -> None:
    x = torch.zeros(4, device="cuda")
    with on_capture_stream(capture):
        try:
            capture.begin()
            torch.rand(4, device="cuda")
            (x + 1).sum().item()  # waits, which breaks the capture
        except BaseException:
            capture.abandon()
            raise


def test_a_capture_that_breaks_leaves_the_gpu_as_it_was() -> None:
    with pytest.raises(RuntimeError):
        break_a_capture(CudaCapture(torch.device("cuda", 0)))
    require_a_working_gpu()


def test_a_step_that_waits_is_found_before_it_is_captured() -> None:
    x = torch.zeros(4, device="cuda")

    def step() -> torch.Tensor:
        return x + (1 if (x + 1).sum().item() else 2)

    graphed = new_graphed_step(step, 1e-2, lambda: CudaCapture(torch.device("cuda", 0)))
    with pytest.warns(UserWarning, match="own code, slower"):
        results = [graphed().tolist() for _ in range(5)]
    assert results == [[1.0] * 4] * 5
    assert torch.cuda.get_sync_debug_mode() == 0
    require_a_working_gpu()


def test_a_step_that_breaks_only_while_it_is_captured_runs_as_it_is() -> None:
    x = torch.zeros(4, device="cuda")

    def step() -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.rand(4, device="cuda")
            raise RuntimeError("made up")
        return x + 1

    graphed = new_graphed_step(step, 1e-2, lambda: CudaCapture(torch.device("cuda", 0)))
    with pytest.warns(UserWarning, match="made up"):
        results = [graphed().tolist() for _ in range(5)]
    assert results == [[1.0] * 4] * 5
    require_a_working_gpu()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_streams_of_a_gpu_that_is_not_the_current_one() -> None:
    streams = CudaStreams(1)
    host = torch.randint(256, (4 * LEAST_BYTES,), dtype=torch.uint8)
    target, seen = streams.empty(host.nbytes), list[torch.Tensor]()
    assert streams.pin(host)
    pieces = zip(target.split(LEAST_BYTES), host.split(LEAST_BYTES), strict=True)
    streams.copy(Stream.FETCH, [HostCopy(*piece) for piece in pieces])
    streams.wait(Stream.COMPUTE, streams.record(Stream.FETCH))
    streams.run(Stream.COMPUTE, lambda: seen.append(target.clone()))
    streams.synchronize()
    assert torch.cuda.current_device() == 0
    assert seen[0].device.index == 1
    assert torch.equal(seen[0].cpu(), host)
    streams.unpin(host)

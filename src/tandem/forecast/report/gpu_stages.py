"""Stages for a GPU: hand-over, copies, kernels, captures, then a small model."""

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import tandem
from tandem.core.errors import ExecutionError
from tandem.devices.cuda.batch_copy import LEAST_BYTES
from tandem.devices.cuda.captures import CudaCapture, on_capture_stream
from tandem.devices.cuda.checks import require_cuda
from tandem.devices.cuda.hand_over_trial import find_signals, graph_costs
from tandem.devices.cuda.streams import CudaStreams, HostCopy, Stream
from tandem.forecast.report.cpu_stages import logits_of, save_tiny_model
from tandem.forecast.report.stages import NotHereError, Stage, StageResult
from tandem.generate.generator import Generator
from tandem.hf.runtime import require_runtime
from tandem.kernels.formats import ExpertLayout, find_format
from tandem.kernels.native import ActivationKind, NativeActivation

_SWIGLU = NativeActivation(ActivationKind.SWIGLU)
_COPY_BYTES = 1 << 28
_EXPERTS = 64
_HIDDEN, _INTERMEDIATE = 2048, 768  # the size of Qwen3-30B-A3B's experts
_HAND_OVER_HIDDEN = 2048
_REPLAYS = 100
_LAUNCHES = 50
_MOST_DIVERGENCE = 1e-3


def gpu() -> StageResult:
    """Report the GPU's properties and the versions of torch, Transformers and Triton."""
    import triton

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return StageResult(f"{require_cuda()}, {versions}, triton {triton.__version__}")


def hand_over() -> StageResult:
    """Time the hand-over of layers between a graph and a host thread."""
    streams = CudaStreams()
    signals = find_signals(streams)
    if signals is None:
        raise NotHereError("decode steps break at the experts of each layer instead")

    costs = graph_costs(
        signals, streams, _HAND_OVER_HIDDEN, 0.0, make_capture=lambda: CudaCapture(streams.device)
    )
    layer, way = costs.layer_seconds * 1e6, costs.cpu_begin_seconds * 1e6
    numbers = {"layer_microseconds": layer, "one_way_microseconds": way}
    return StageResult(f"{signals.name}: a layer {layer:.1f} us, one way {way:.1f} us", numbers)


def _memories() -> tuple[CudaStreams, Tensor, Tensor]:
    """Return streams, host memory and GPU memory, for timing copies."""
    streams = CudaStreams()
    host = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cpu")
    return streams, host, streams.empty(_COPY_BYTES)


def _pin(streams: CudaStreams, host: Tensor) -> None:
    if not streams.pin(host) or not host.is_pinned():
        raise ExecutionError("the driver does not register the host's memory")


def pinned_copies() -> StageResult:
    """Time copies from pageable memory, and from the same memory once it is pinned."""
    streams, host, target = _memories()

    def copy() -> None:
        target.copy_(host, non_blocking=True)

    pageable = _COPY_BYTES / streams.seconds(Stream.FETCH, copy) / 1e9
    _pin(streams, host)
    streams.seconds(Stream.FETCH, copy)
    pinned = _COPY_BYTES / streams.seconds(Stream.FETCH, copy) / 1e9
    small = [(host[i << 20 : (i + 1) << 20], target[i << 20 : (i + 1) << 20]) for i in range(64)]

    def copy_small() -> None:
        for source, place in small:
            place.copy_(source, non_blocking=True)

    begin = time.perf_counter()
    streams.run(Stream.FETCH, copy_small)
    queued = (time.perf_counter() - begin) / len(small)
    in_pieces = len(small) * (1 << 20) / streams.seconds(Stream.FETCH, copy_small) / 1e9
    streams.synchronize()
    streams.unpin(host)
    return StageResult(
        f"pageable {pageable:.1f} GB/s, pinned {pinned:.1f} GB/s, pieces of 1 MiB {in_pieces:.1f} "
        f"GB/s at {queued * 1e6:.1f} us of the host each",
        {"pageable": pageable, "pinned": pinned, "pieces": in_pieces},
    )


def batched_copies() -> StageResult:
    """Time one call for several copies against one call per copy, on the host and on the link."""
    streams, host, target = _memories()
    _pin(streams, host)
    size = 4 * LEAST_BYTES
    pieces = [HostCopy(*piece) for piece in zip(target.split(size), host.split(size), strict=True)]
    has_batch = streams._batch_copy is not None
    together = _copy_speed(streams, pieces)
    streams._batch_copy = None
    alone = _copy_speed(streams, pieces)
    streams.unpin(host)
    name = "one call" if has_batch else "no batched copy in this driver"
    return StageResult(f"{name}: {together}; one by one {alone}")


def _copy_speed(streams: CudaStreams, pieces: list[HostCopy]) -> str:
    streams.copy(Stream.FETCH, pieces)
    streams.synchronize()
    first = streams.record(Stream.FETCH, is_timed=True)
    begin = time.perf_counter()
    streams.copy(Stream.FETCH, pieces)
    queued = time.perf_counter() - begin
    last = streams.record(Stream.FETCH, is_timed=True)
    last.synchronize()
    rate = _COPY_BYTES / streams.between(first, last) / 1e9
    return f"{rate:.1f} GB/s at {queued / len(pieces) * 1e6:.1f} us of the host a copy"


def throttle() -> StageResult:
    """Time a pause of 20 ms on the fetch stream, and how long the host takes to queue it."""
    streams = CudaStreams()
    streams.pause(Stream.FETCH, 1e-3)
    streams.synchronize()
    begin = time.perf_counter()
    streams.pause(Stream.FETCH, 20e-3)
    queued = time.perf_counter() - begin
    streams.synchronize()
    took = time.perf_counter() - begin
    return StageResult(f"20 ms took {took * 1e3:.2f} ms, queued in {queued * 1e6:.0f} us")


def memory_bandwidth() -> StageResult:
    """Time a sum over 1 GiB of device memory."""
    data = torch.ones(1 << 28, dtype=torch.float32, device="cuda")

    def read() -> None:
        data.sum()

    rate = data.nbytes / _seconds(read) / 1e12
    return StageResult(f"sum reads {rate:.2f} TB/s", {"terabytes_per_second": rate})


def kernels_few() -> StageResult:
    """Time the vector kernels: experts of Qwen3-30B-A3B's shape, one token each."""
    return StageResult(
        "; ".join(_kernel_speed(name, 1) for name in ("int4", "int8", "bf16", "mxfp4"))
    )


def kernels_many() -> StageResult:
    """Time the matrix kernels: 128 tokens for each expert."""
    return StageResult("; ".join(_kernel_speed(name, 128) for name in ("int4", "bf16")))


def graph() -> StageResult:
    """Capture two graphs with eager work between them, and replay them."""
    x, capture = torch.zeros(4, device="cuda"), CudaCapture(torch.device("cuda"))
    with on_capture_stream(capture):
        capture.begin()
        middle = x + 1
        first = capture.end()
        capture.begin()
        last = middle * 2
        second = capture.end()
    x.fill_(4)
    first.replay()
    middle.add_(1)
    second.replay()
    if last.tolist() != [12.0] * 4:
        raise ExecutionError(f"two replayed pieces gave {last.tolist()} instead of 12")
    begin = time.perf_counter()
    for _ in range(_REPLAYS):
        first.replay()
    seconds = (time.perf_counter() - begin) / _REPLAYS
    return StageResult(f"a replay costs the host {seconds * 1e6:.1f} us")


def broken_capture() -> StageResult:
    """Break a capture; random numbers, the allocator and another capture must still work."""
    device = torch.device("cuda", 0)
    capture, x = CudaCapture(device), torch.zeros(4, device=device)
    message = "nothing raised"
    with on_capture_stream(capture):
        capture.begin()
        try:
            torch.rand(4, device=device)
            (x + 1).sum().item()
        except RuntimeError as error:
            message = str(error).partition("\n")[0]
        capture.abandon()
    torch.cuda.empty_cache()
    torch.rand(4, device=device).tolist()
    graph()
    return StageResult(f"undone after: {message}")


def small_model(device: str = "cuda") -> StageResult:
    """Compare a tiny model with half of its experts on the GPU with the same model on the CPU.

    Raises `ExecutionError` if their logits disagree.
    """
    with TemporaryDirectory() as folder:
        checkpoint = save_tiny_model(Path(folder) / "tiny")
        alone = tandem.load(checkpoint, dtype="float32", expert_dtype="mxfp4")
        hybrid = tandem.load(
            checkpoint, dtype="float32", expert_dtype="mxfp4", device=device, cache_dir=folder
        )
        cache = require_runtime(hybrid).executor.cache
        if cache is None:
            raise ExecutionError(f"a model that was loaded for {device} has no expert cache")
        cache.resize(cache.geometry.num_layers * cache.geometry.num_experts // 2)
        ours, theirs = Generator(hybrid), Generator(alone)
        found, expected = (logits_of(each).log_softmax(-1) for each in (ours, theirs))
        each = F.kl_div(found, expected, reduction="none", log_target=True).sum(-1)
        divergence = each.max().item()  # max keeps NaN
        require_runtime(hybrid).executor.close()
    if not divergence < _MOST_DIVERGENCE:  # also if it is NaN
        raise ExecutionError(f"its logits are {divergence:.2g} nats from the CPU's")
    slower = f"; {ours.why_slower}" if ours.why_slower else ""
    text = f"KL at most {max(0.0, divergence):.1e} nats from the CPU in fp32{slower}"
    return StageResult(text, {"kl": divergence})


def _kernel_speed(name: str, num_tokens: int) -> str:
    from tandem.triton_kernels.experts import TritonExperts
    from tandem.triton_kernels.rows import row_table

    layout = ExpertLayout(find_format(name), _HIDDEN, _INTERMEDIATE, is_gated=True, has_bias=False)
    store = torch.zeros(_EXPERTS, layout.num_bytes, dtype=torch.uint8, device="cuda")
    token = torch.arange(num_tokens, device="cpu").repeat(_EXPERTS).int()
    begin = list(range(0, _EXPERTS * num_tokens + 1, num_tokens))
    table = row_table([buffer.data_ptr() for buffer in store], begin, token)
    rows = table.on(table.memory.cuda())
    hidden = torch.randn(num_tokens, _HIDDEN, device="cuda").bfloat16()
    out, kernels = torch.empty(len(token), _HIDDEN, device="cuda"), TritonExperts()

    def launch() -> None:
        kernels.compute(layout, _SWIGLU, hidden, rows, out)

    seconds, begin_host = _seconds(launch), time.perf_counter()
    for _ in range(_LAUNCHES):
        launch()
    host = (time.perf_counter() - begin_host) / _LAUNCHES
    if num_tokens == 1:
        speed = f"{_EXPERTS * layout.num_bytes / seconds / 1e12:.2f} TB/s"
    else:
        work = _EXPERTS * num_tokens * 3 * _HIDDEN * _INTERMEDIATE * 2
        speed = f"{work / seconds / 1e12:.0f} TFLOP/s"
    return f"{name} {speed}, {host * 1e6:.0f} us of the host"


def _seconds(work: Callable[[], None]) -> float:
    """Return the GPU's median time for some work."""
    streams = CudaStreams()
    streams.seconds(Stream.COMPUTE, work)
    return sorted(streams.seconds(Stream.COMPUTE, work) for _ in range(9))[4]


GPU_STAGES = tuple(
    Stage(run.__name__, run)
    for run in (
        gpu, hand_over, pinned_copies, batched_copies, throttle, memory_bandwidth, kernels_few,
        kernels_many, graph, broken_capture, small_model,
    )
)  # fmt: skip

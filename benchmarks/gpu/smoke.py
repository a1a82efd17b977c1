"""A minute on a GPU that says what works: stage by stage, the first that fails ends it.

    python -m benchmarks.gpu.smoke [--all]

How a graph and the host hand over, copies, throttle, kernels, captures, then a small model through
the whole stack; between them the largest bandwidths, as ceilings. Each stage is named before it
begins, so that also one that hangs or crashes is known. With `--all` a failure does not keep the
later stages from running. What only plans need and a machine does not have ends nothing: it is said
with what to use instead.
"""

import argparse
import faulthandler
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from benchmarks.gpu.hand_off import NOT_HERE, PIECES, NotHereError

from tandem.devices.cuda.batch_copy import LEAST_BYTES
from tandem.devices.cuda.checks import require_cuda
from tandem.devices.cuda.streams import CudaStreams, HostCopy, Stream
from tandem.hf.runtime import require_runtime
from tandem.kernels.formats import ExpertLayout, find_format
from tandem.kernels.native import ActivationKind, NativeActivation

SWIGLU = NativeActivation(ActivationKind.SWIGLU)
COPY_BYTES = 1 << 28
EXPERTS = 64
HAND_OFF_SECONDS = 60


def main() -> int:
    """Run the stages; returns the exit code."""
    parser = argparse.ArgumentParser(description="Say what works on this GPU.")
    parser.add_argument("--all", action="store_true", help="go on after a failure")
    goes_on = parser.parse_args().all
    faulthandler.enable()  # a crash in a driver names the line too
    failed, missing = [], []
    for number, stage in enumerate(STAGES, 1):
        print(f"[{number}/{len(STAGES)}] {stage.__name__} ...", flush=True)
        begin = time.perf_counter()
        try:
            said = stage()
        except NotHereError as error:
            missing.append(stage.__name__)
            print(f"no    {stage.__name__}: {error}", flush=True)
            continue
        except Exception:
            failed.append(stage.__name__)
            print(f"FAIL  {stage.__name__}\n{traceback.format_exc()}", flush=True)
            if goes_on:
                continue
            break
        seconds = time.perf_counter() - begin
        print(f"ok    {stage.__name__}: {said} ({seconds:.1f} s)", flush=True)
    without = f"; not on this machine: {', '.join(missing)}" if missing else ""
    print(f"smoke failed at: {', '.join(failed)}" if failed else f"smoke: all is well{without}")
    return 1 if failed else 0


def gpu() -> str:
    """Say what is here."""
    found = require_cuda()
    import transformers
    import triton

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{found}, {versions}, triton {triton.__version__}"


def stream_operations() -> str:
    """Write, wait and reset inside a captured graph, replayed twice."""
    return _hand_off("operations")


def mapped_memory() -> str:
    """Let a kernel write to mapped pinned memory and the host see it in order, and back."""
    return _hand_off("mapped")


def hand_off_latency() -> str:
    """Time such a hand-off."""
    return _hand_off("latency")


def pinned_copies() -> str:
    """Time copies from registered memory, against pageable."""
    streams = CudaStreams()
    host, target = torch.zeros(COPY_BYTES, dtype=torch.uint8), streams.empty(COPY_BYTES)

    def copy() -> None:
        target.copy_(host, non_blocking=True)

    pageable = COPY_BYTES / streams.seconds(Stream.FETCH, copy) / 1e9
    assert streams.pin(host)
    assert host.is_pinned()
    streams.seconds(Stream.FETCH, copy)
    pinned = COPY_BYTES / streams.seconds(Stream.FETCH, copy) / 1e9
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
    return (
        f"pageable {pageable:.1f} GB/s, pinned {pinned:.1f} GB/s, 1 MiB pieces {in_pieces:.1f} "
        f"GB/s at {queued * 1e6:.1f} us of the host each"
    )


def batched_copies() -> str:
    """Compare one call for several copies with one call each, in the host's time and the link's."""
    streams = CudaStreams()
    host, target = torch.zeros(COPY_BYTES, dtype=torch.uint8), streams.empty(COPY_BYTES)
    assert streams.pin(host)
    size = 4 * LEAST_BYTES
    pieces = [HostCopy(*piece) for piece in zip(target.split(size), host.split(size), strict=True)]
    said = []
    for is_batched in (True, False):
        if not is_batched:
            said.append("one call" if streams._batch_copy else "no batched copy in this driver")
            streams._batch_copy = None
        streams.copy(Stream.FETCH, pieces)
        streams.synchronize()
        first = streams.record(Stream.FETCH, is_timed=True)
        begin = time.perf_counter()
        streams.copy(Stream.FETCH, pieces)
        queued = time.perf_counter() - begin
        last = streams.record(Stream.FETCH, is_timed=True)
        last.synchronize()
        rate = COPY_BYTES / streams.between(first, last) / 1e9
        said.append(f"{rate:.1f} GB/s at {queued / len(pieces) * 1e6:.1f} us of the host a copy")
    streams.unpin(host)
    return f"{said[1]}: {said[0]}; one by one {said[2]}"


def throttle() -> str:
    """Check that a pause lasts as long as it should."""
    streams = CudaStreams()
    streams.pause(Stream.FETCH, 1e-3)
    streams.synchronize()
    begin = time.perf_counter()
    streams.pause(Stream.FETCH, 20e-3)
    queued = time.perf_counter() - begin
    streams.synchronize()
    return (
        f"20 ms took {(time.perf_counter() - begin) * 1e3:.2f} ms, queued in {queued * 1e6:.0f} us"
    )


def memory_bandwidth() -> str:
    """Time a read of much device memory."""
    data = torch.ones(1 << 29, dtype=torch.float32, device="cuda")

    def read() -> None:
        data.sum()

    return f"sum reads {data.nbytes / _seconds(read) / 1e12:.2f} TB/s"


def kernels_few() -> str:
    """Time the vector kernels: experts of Qwen3-30B-A3B's shape, one token each."""
    return "; ".join(_kernel_speed(name, 1) for name in ("int4", "int8", "bf16", "mxfp4"))


def kernels_many() -> str:
    """Time the matrix kernels: 128 tokens for each expert."""
    return "; ".join(_kernel_speed(name, 128) for name in ("int4", "bf16"))


def graph() -> str:
    """Capture two pieces with eager work between, and replay them."""
    from tandem.devices.cuda.captures import CudaCapture, on_capture_stream

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
    assert last.tolist() == [12.0] * 4
    begin = time.perf_counter()
    for _ in range(100):
        first.replay()
    return f"a replay costs the host {(time.perf_counter() - begin) * 1e4:.1f} us"


def broken_capture() -> str:
    """Break a capture; random numbers, the allocator and another capture must still work."""
    from tandem.devices.cuda.captures import CudaCapture, on_capture_stream

    device = torch.device("cuda", 0)
    capture, x = CudaCapture(device), torch.zeros(4, device=device)
    said = "nothing raised"
    with on_capture_stream(capture):
        capture.begin()
        try:
            torch.rand(4, device=device)
            (x + 1).sum().item()
        except RuntimeError as error:
            said = str(error).partition("\n")[0]
        capture.abandon()
    torch.cuda.empty_cache()
    torch.rand(4, device=device).tolist()
    graph()
    return f"undone after: {said}"


def small_model() -> str:
    """Load a tiny model for the GPU; its captured steps must say what the CPU says."""
    from tests.gpu.models import compare_logits, load_hybrid
    from tests.hf.tiny import save_tiny_checkpoint

    import tandem
    from tandem.decode.cuda.graphs import CapturedStep
    from tandem.decode.cuda.slots import new_cuda_slot_pool
    from tandem.generate.generator import Generator

    with TemporaryDirectory() as folder:
        checkpoint = save_tiny_checkpoint(Path(folder) / "mixtral", "mixtral")
        alone = tandem.load(checkpoint, dtype="float32", expert_dtype="mxfp4", threads=2)
        hybrid = load_hybrid(checkpoint, "float32", Path(folder), expert_dtype="mxfp4")
        prompt = list(range(40, 60))
        pool, plain = new_cuda_slot_pool(hybrid, 1), Generator(alone).slot_pool(1)
        pairs = [(pool.prefill({0: prompt}), plain.prefill({0: prompt}))]
        pairs += [
            (pool.decode({0: t}).clone(), plain.decode({0: t}).clone()) for t in range(60, 80)
        ]
        divergence = max(compare_logits(ours, theirs)[0] for ours, theirs in pairs)
        assert divergence < 1e-3, f"KL {divergence}"
        why, captured = pool.step.why_not, pool.step.recording
        require_runtime(hybrid).executor.close()
    assert isinstance(captured, CapturedStep), f"not captured: {why}"
    count = captured.num_segments
    return f"KL at most {divergence:.1e} from the CPU in fp32, {count} graph segments a step"


def _hand_off(check: str) -> str:
    """Run a check in a process of its own: a wait that does not end cannot be undone here."""
    command = [sys.executable, "-m", "benchmarks.gpu.hand_off", check]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=HAND_OFF_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotHereError(
            f"a wait has held the GPU for {HAND_OFF_SECONDS} s; use neither: {PIECES}"
        ) from error
    said = done.stdout.strip().rpartition("\n")[2]
    if done.returncode == NOT_HERE:
        raise NotHereError(said)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return said


def _kernel_speed(name: str, num_tokens: int) -> str:
    from tandem.triton_kernels.experts import TritonExperts
    from tandem.triton_kernels.rows import row_table

    layout = ExpertLayout(find_format(name), 2048, 768, is_gated=True, has_bias=False)
    store = torch.zeros(EXPERTS, layout.num_bytes, dtype=torch.uint8, device="cuda")
    token = torch.arange(num_tokens).repeat(EXPERTS).int()
    begin = list(range(0, EXPERTS * num_tokens + 1, num_tokens))
    table = row_table([buffer.data_ptr() for buffer in store], begin, token)
    rows = table.on(table.memory.cuda())
    hidden = torch.randn(num_tokens, 2048, device="cuda").bfloat16()
    out, kernels = torch.empty(len(token), 2048, device="cuda"), TritonExperts()

    def launch() -> None:
        kernels.compute(layout, SWIGLU, hidden, rows, out)

    seconds, begin_host = _seconds(launch), time.perf_counter()
    for _ in range(50):
        launch()
    host = (time.perf_counter() - begin_host) / 50
    if num_tokens == 1:
        speed = f"{EXPERTS * layout.num_bytes / seconds / 1e12:.2f} TB/s"
    else:
        speed = f"{EXPERTS * num_tokens * 3 * 2048 * 768 * 2 / seconds / 1e12:.0f} TFLOP/s"
    return f"{name} {speed}, {host * 1e6:.0f} us of the host"


def _seconds(work: Callable[[], None]) -> float:
    """Return the GPU's time for some work, the median of several."""
    streams = CudaStreams()
    streams.seconds(Stream.COMPUTE, work)
    return sorted(streams.seconds(Stream.COMPUTE, work) for _ in range(9))[4]


STAGES: tuple[Callable[[], str], ...] = (
    gpu,
    stream_operations,
    mapped_memory,
    hand_off_latency,
    pinned_copies,
    batched_copies,
    throttle,
    memory_bandwidth,
    kernels_few,
    kernels_many,
    graph,
    broken_capture,
    small_model,
)


if __name__ == "__main__":
    sys.exit(main())

"""A minute on a GPU that says what works: each step alone, with its time, none stops the next.

    python -m benchmarks.gpu.smoke

Kernels, pinned copies, throttle, a graph, then the largest matrices and bandwidths, as ceilings.
"""

import sys
import time
import traceback
from collections.abc import Callable

import torch

from tandem.kernels.formats import ExpertLayout, find_format
from tandem.kernels.native import ActivationKind, NativeActivation
from tandem.offload.cuda_checks import require_cuda
from tandem.offload.cuda_streams import CudaStreams, Lane

SWIGLU = NativeActivation(ActivationKind.SWIGLU)
COPY_BYTES = 1 << 28
EXPERTS = 64


def main() -> int:
    """Run all steps; returns how many failed."""
    failed = 0
    for step in (gpu, pinned_copies, throttle, memory_bandwidth, kernels_few, kernels_many, graph):
        begin = time.perf_counter()
        try:
            said = step()
            print(
                f"ok    {step.__name__}: {said} ({time.perf_counter() - begin:.1f} s)", flush=True
            )
        except Exception:
            failed += 1
            print(f"FAIL  {step.__name__}\n{traceback.format_exc()}", flush=True)
    return failed


def gpu() -> str:
    """Say what is here."""
    found = require_cuda()
    import transformers
    import triton

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{found}, {versions}, triton {triton.__version__}"


def pinned_copies() -> str:
    """Time copies from registered memory, against pageable."""
    streams = CudaStreams()
    host, target = torch.zeros(COPY_BYTES, dtype=torch.uint8), streams.empty(COPY_BYTES)

    def copy() -> None:
        target.copy_(host, non_blocking=True)

    pageable = COPY_BYTES / streams.seconds(Lane.FETCH, copy) / 1e9
    assert streams.pin(host)
    assert host.is_pinned()
    streams.seconds(Lane.FETCH, copy)
    pinned = COPY_BYTES / streams.seconds(Lane.FETCH, copy) / 1e9
    small = [(host[i << 20 : (i + 1) << 20], target[i << 20 : (i + 1) << 20]) for i in range(64)]

    def copy_small() -> None:
        for source, place in small:
            place.copy_(source, non_blocking=True)

    begin = time.perf_counter()
    streams.run(Lane.FETCH, copy_small)
    queued = (time.perf_counter() - begin) / len(small)
    in_pieces = len(small) * (1 << 20) / streams.seconds(Lane.FETCH, copy_small) / 1e9
    streams.synchronize()
    streams.unpin(host)
    return (
        f"pageable {pageable:.1f} GB/s, pinned {pinned:.1f} GB/s, 1 MiB pieces {in_pieces:.1f} "
        f"GB/s at {queued * 1e6:.1f} us of the host each"
    )


def throttle() -> str:
    """Check that a pause lasts as long as it should."""
    streams = CudaStreams()
    streams.pause(Lane.FETCH, 1e-3)
    streams.synchronize()
    begin = time.perf_counter()
    streams.pause(Lane.FETCH, 20e-3)
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
    from tandem.hf.cuda_graphs import CudaCapture, on_capture_stream

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


def _kernel_speed(name: str, num_tokens: int) -> str:
    from tandem.kernels.triton.experts import TritonExperts
    from tandem.kernels.triton.rows import row_table

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
    streams.seconds(Lane.COMPUTE, work)
    return sorted(streams.seconds(Lane.COMPUTE, work) for _ in range(9))[4]


if __name__ == "__main__":
    sys.exit(main())

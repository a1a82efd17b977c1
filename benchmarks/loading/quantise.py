"""The quantiser's speed against llama.cpp's, in turns.

    python -m benchmarks.loading.quantise [--threads N] [--rounds N] [--isa NAME]

One matrix of bf16 weights, as in a checkpoint, is quantised to Tandem's formats with their scale
search, and to Q4_0 and Q4_K by `ggml_quantize_chunk` of an installed llama-cpp-python. Its source
is fp32 (which its own program converts to first), and its rows are divided among as many threads.
Both write to memory that has been written before. The ceiling is a copy of the same bytes. The last
line is JSON.
"""

import argparse
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from time import perf_counter

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `import tandem` sets it, here too late

import torch
from benchmarks.loading.ggml import Ggml
from gguf import GGMLQuantizationType
from torch import Tensor

from tandem.kernels import engine
from tandem.kernels.engine import choose_isa
from tandem.kernels.formats import PackedMatrix, find_format
from tandem.kernels.formats.packed import write_weight

ROWS, COLS = 6144, 2048
FORMATS = ("int4-g32", "int4-g128", "int8-g128", "int4z-g32", "mxfp4", "fp8", "bf16")
RIVALS = ("Q4_0", "Q4_K")


def ours(weights: Tensor, name: str) -> Callable[[], None]:
    """Return a function that quantises the weights to a format."""
    fmt = find_format(name)
    packed = PackedMatrix.empty(ROWS, COLS, fmt)
    return lambda: write_weight(packed.blocks, fmt, weights)


def llama_cpp(weights: Tensor, name: str, num_threads: int) -> Callable[[], None] | None:
    """Return a function that does the same by llama.cpp's library; None if it is not installed."""
    try:
        library = Ggml()
    except ImportError:
        return None
    kind, source = GGMLQuantizationType[name], weights.float().numpy()
    out, rows = library.room(source, kind), len(source)
    step = -(-rows // num_threads)
    pool = ThreadPoolExecutor(num_threads)

    def part(first: int) -> None:
        library.quantize_rows(source, out, kind, first, min(step, rows - first))

    def run() -> None:
        for _ in pool.map(part, range(0, rows, step)):
            pass

    return run


def main() -> None:
    """Measure in turns, print the table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--isa", default="", help="Tandem's instruction set; default: the best")
    flags = parser.parse_args()
    isa = choose_isa(flags.isa)
    setattr(engine, "best_isa", lambda: isa)  # noqa: B010  a function, for the type checker
    torch.set_num_threads(flags.threads)
    weights = (
        0.02 * torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(1))
    ).bfloat16()
    copy = torch.empty_like(weights)
    runs: dict[str, Callable[[], object] | None] = {"copy": lambda: copy.copy_(weights)}
    runs |= {name: ours(weights, name) for name in FORMATS}
    runs |= {name: llama_cpp(weights, name, flags.threads) for name in RIVALS}
    seconds: dict[str, list[float]] = {name: [] for name, run in runs.items() if run is not None}
    for _ in range(1 + flags.rounds):  # the first writes to memory for the first time
        for name, times in seconds.items():
            run, start = runs[name], perf_counter()
            assert run is not None
            run()
            times.append(perf_counter() - start)
    speeds = {name: weights.numel() / median(times[1:]) / 1e6 for name, times in seconds.items()}
    print(f"{isa}, {flags.threads} threads, {ROWS} x {COLS} bf16 weights")
    for name, speed in speeds.items():
        over = [f"{speed / speeds[rival]:6.2f} x {rival}" for rival in RIVALS if rival in speeds]
        print(f"{name:10} {speed:7.0f} M weights/s  {'  '.join(over)}")
    print(json.dumps({"threads": flags.threads, "isa": isa, "million_per_second": speeds}))


if __name__ == "__main__":
    main()

"""Where a decode step's and a prompt's time goes on a GPU: kernels, copies, gaps, host functions.

    python -m benchmarks.gpu.timeline --shape qwen3-30b-a3b --layers 12 --out FOLDER

For each share of the experts and each batch it prints the step's wall time, the busy time of GPU
and link, and the kernels by their time; for a prompt also the host's functions. A trace of each
(Chrome's format) is written to FOLDER. Profiling makes times longer.
"""

import argparse
import cProfile
import io
import pstats
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.__main__ import _build
from benchmarks.gpu.cells import Cell
from benchmarks.gpu.measure import WARM_STEPS, _decode, _timed, warm_prompts
from benchmarks.gpu.systems import TANDEM

from tandem.bench.model_shapes import MODEL_SHAPES, find_shape
from tandem.decode.cuda.slots import CudaSlotPool, new_cuda_slot_pool
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.hf.runtime import require_runtime

STEPS = 8
MOST_ROWS = 32


def main() -> int:
    """Profile the cells; return the exit code."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    first = Cell(options.format, options.shares[0], options.batches[0], TANDEM)
    model = _build(find_shape(options.shape), first, options)
    executor = require_runtime(model).executor
    assert isinstance(executor, HybridExecutor)
    for share in options.shares:
        _resize(executor, share)
        for batch in options.batches:
            _profile(model, f"{share:.0%}-batch-{batch}", batch, options)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=sorted(MODEL_SHAPES))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--format", default="int4")
    parser.add_argument("--dense-dtype", default="none", help="of the layers beside the experts")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.25])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--link-bandwidth")
    parser.add_argument("--cache-dir")
    parser.add_argument("--profile")
    parser.add_argument("--device", default="cuda", choices=["cuda", "emulated"])
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def _resize(executor: HybridExecutor, share: float) -> None:
    cache = executor.cache
    num_experts = cache.geometry.num_layers * cache.geometry.num_experts
    if share == 1.0:
        executor.resize_now(cache.settings.slots_for(num_experts), list(range(num_experts)))
    else:
        executor.resize_now(max(1, int(share * num_experts)))


def _profile(model: Any, name: str, batch: int, options: argparse.Namespace) -> None:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    length = options.prompt_tokens
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(vocabulary, (3, batch, length), generator=generator).tolist()
    pool = new_cuda_slot_pool(
        model, batch, capacity=length + 256, has_replay=torch.cuda.is_available()
    )
    print(f"== {name}", flush=True)
    warm_prompts(pool, prompts[0])
    for number, each in enumerate(prompts):
        _forget(pool)
        filled = dict(enumerate(each))
        if number == 0:
            pool.prefill(filled)
            for step in pool.prompt_steps:
                print(f"captured: {step.replayed.is_replaying} {step.replayed.why_not}")
        elif number == 1:
            seconds = _timed(partial(pool.prefill, filled))
            print(f"prompt: {seconds * 1e3:.1f} ms, {batch * length / seconds:.0f} tok/s")
            _forget(pool)
            _host_functions(partial(pool.prefill, filled))
        else:
            _kernels(partial(pool.prefill, filled), 1, options.out / f"{name}-prompt")
    _decode(pool, WARM_STEPS, batch)
    seconds = _timed(lambda: _decode(pool, 32, batch)) / 32
    print(f"step: {seconds * 1e3:.3f} ms, captured: {pool.step.is_replaying} {pool.step.why_not}")
    _host_functions(partial(_decode, pool, STEPS, batch))
    _kernels(partial(_decode, pool, STEPS, batch), STEPS, options.out / f"{name}-step")
    sys.stdout.flush()


def _forget(pool: CudaSlotPool) -> None:
    for slot in range(pool.num_slots):
        pool.keep(slot, 0)


def _host_functions(work: Callable[[], object]) -> None:
    profiler = cProfile.Profile()
    profiler.runcall(work)
    for order in ("tottime", "cumulative"):
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).strip_dirs().sort_stats(order).print_stats(MOST_ROWS)
        print(text.getvalue())


def _kernels(work: Callable[[], object], steps: int, path: Path) -> None:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        seconds = _timed(work)
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in profile.events():
        if not str(event.device_type).endswith("CUDA"):
            continue
        span = event.time_range
        totals[event.name][0] += 1
        totals[event.name][1] += span.end - span.start
        spans["HtoD" in event.name or "DtoH" in event.name].append((span.start, span.end))
    print(
        f"profiled: {seconds / steps * 1e3:.3f} ms, GPU busy {_covered(spans[False]) / steps:.0f} "
        f"us, link {_covered(spans[True]) / steps:.0f} us"
    )
    ordered = sorted(totals.items(), key=lambda each: -each[1][1])
    for name, (count, microseconds) in ordered[:MOST_ROWS]:
        print(f"  {microseconds / steps:9.1f} us {count / steps:7.1f} x  {name[:110]}")
    profile.export_chrome_trace(f"{path}.json.gz".replace("%", ""))


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the total time that some spans cover."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


if __name__ == "__main__":
    sys.exit(main())

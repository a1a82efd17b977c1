"""The hybrid runtime on a GPU, against the fully resident bound and other ways to decide.

    python -m benchmarks.gpu --shape qwen3-30b-a3b [--layers N] [--out result.json]

Builds a released shape with random weights, uses its routers or replays real routing, and prints a
line per cell as soon as it is measured, so that an interrupted run loses nothing. The last line of
standard output is one JSON document.
"""

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.disk.routing import TRACES, forced_trace
from benchmarks.gpu.cells import Cell, cells
from benchmarks.gpu.measure import Result, Work, measure
from benchmarks.gpu.systems import BASELINES, SimulatedConfig

from tandem.bench.model_shapes import MODEL_SHAPES, ModelShape, find_shape
from tandem.bench.random_model import build_random_model
from tandem.core.errors import TandemError
from tandem.devices.cuda.streams import CudaStreams, HostCopy, Stream
from tandem.experts.execution.forced_routing import ForcedRouting
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.hf.assembly import assemble
from tandem.hf.config import OffloadConfig
from tandem.hf.runtime import require_runtime

BAR_CHARACTERS = 40
LINK_BYTES = 256 << 20
FORCED_TOKENS = 8192  # of a synthetic routing, which then begins again


def main() -> int:
    """Measure the cells; return the exit code."""
    options = _options()
    shape = find_shape(options.shape)
    begin, rows = time.perf_counter(), []
    chosen = cells(options.formats, options.shares, options.batches, options.systems)
    model: Any = None
    print(f"{options.shape}, {options.layers or 'all'} layers, {len(chosen)} cells", flush=True)
    link = _link_speed()
    before: Cell | None = None
    for cell in chosen:
        if time.perf_counter() - begin > options.seconds:
            print(f"stopped after {options.seconds} s; the other cells are not measured")
            break
        try:
            if before is None or before.expert_dtype != cell.expert_dtype:
                del model
                gc.collect()
                model = _build(shape, cell, options)
            elif before.system != cell.system:
                assemble(model, require_runtime(model), _config(cell, options))
            result = _measure(model, cell, options)
        except (TandemError, RuntimeError) as error:
            first_line = str(error).partition("\n")[0]
            print(f"{_name(cell)}: failed: {first_line}", flush=True)
            rows.append({**_cell_keys(cell), "failed": first_line})
            before = None  # whatever is left of the model is not used again
            continue
        before = cell
        rows.append({**_cell_keys(cell), **result._asdict()})
        _print(cell, result)
    document = {
        "shape": options.shape, "layers": options.layers, "device": _device_name(),
        "routing": options.routing,
        "gpu_memory_peak_bytes": _peak_bytes(), **link, "seconds": time.perf_counter() - begin,
        "cells": _with_shares_of_bound(rows),
    }  # fmt: skip
    _print_shares(document["cells"])
    text = json.dumps(document)
    if options.out is not None:
        options.out.write_text(text)
    print(text)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the hybrid runtime on a GPU.")
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=sorted(MODEL_SHAPES))
    parser.add_argument("--layers", type=int, help="cut the shape to so many layers")
    parser.add_argument("--vocabulary", type=int, help="cut the vocabulary")
    parser.add_argument("--formats", nargs="+", default=["int4", "bf16"])
    parser.add_argument("--dense-dtype", default="none", help="of the layers beside the experts")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 1.0, 0.25, 0.75])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    names = ["tandem", *(system.name for system in BASELINES)]
    parser.add_argument("--systems", nargs="+", default=names, choices=names)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--link-bandwidth", help="let the link be no faster than this")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=440, help="begin no cell after this")
    parser.add_argument(
        "--routing", default="own", metavar="own|recorded|synthetic|FILE",
        help="the random routers' (default), the shape's trace, as of `benchmarks.disk.routing`",
    )  # fmt: skip
    parser.add_argument("--device", default="cuda", choices=["cuda", "emulated"])
    parser.add_argument("--cache-dir", help="where profiles are kept")
    parser.add_argument("--profile", help="use this hardware profile, measure none")
    parser.add_argument("--out", type=Path, help="write the JSON document here too")
    return parser.parse_args()


def _config(cell: Cell, options: argparse.Namespace) -> OffloadConfig:
    given: dict[str, Any] = {
        "device": options.device,
        "expert_dtype": cell.expert_dtype,
        "dense_dtype": options.dense_dtype,
        "start_content": "random",
        "threads": options.threads,
        "link_bandwidth": options.link_bandwidth,
        "cache_dir": options.cache_dir,
        "profile": options.profile,
    }
    return SimulatedConfig(**{**given, **cell.system.options})


def _build(shape: ModelShape, cell: Cell, options: argparse.Namespace) -> Any:
    begin = time.perf_counter()
    model = build_random_model(
        shape,
        _config(cell, options),
        dense_dtype="none",
        num_layers=options.layers,
        vocabulary=options.vocabulary,
        device="cuda" if options.device == "cuda" else "cpu",
    )
    print(f"{cell.expert_dtype}: built, pinned and measured in {time.perf_counter() - begin:.0f} s")
    return model


def _measure(model: Any, cell: Cell, options: argparse.Namespace) -> Result:
    runtime = require_runtime(model)
    executor = runtime.executor
    assert isinstance(executor, HybridExecutor)
    cache = executor.cache
    geometry = cache.geometry
    num_experts = geometry.num_layers * geometry.num_experts
    num_slots = max(1, int(cell.share * num_experts))
    if cell.share == 1.0:  # all of them resident: nothing is planned, and no routing is forced
        num_slots = cache.settings.slots_for(num_experts)
        every = list(range(num_experts))
        executor.resize_now(num_slots, every)
    else:
        executor.resize_now(num_slots)
    if cell.share < 1.0 and options.routing != "own":
        of_shape = str(TRACES / f"{options.shape}.npz")
        name = of_shape if options.routing == "recorded" else options.routing
        sizes = geometry.num_layers, geometry.num_experts, FORCED_TOKENS, geometry.top_k
        runtime.use(ForcedRouting(executor, forced_trace(name, *sizes)))
    try:
        work = Work(options.prompt_tokens, options.new_tokens, cell.batch)
        return measure(model, executor, work)
    finally:
        runtime.use(executor)


def _cell_keys(cell: Cell) -> dict[str, Any]:
    return {
        "system": cell.system.name, "expert_dtype": cell.expert_dtype, "share": cell.share,
        "batch": cell.batch,
    }  # fmt: skip


def _with_shares_of_bound(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each cell its decode speed as a share of the fully resident cell's."""
    key = "decode_tokens_per_second"
    bounds = {
        (row["expert_dtype"], row["batch"]): row[key]
        for row in rows
        if row["share"] == 1.0 and row["system"] == "tandem" and key in row
    }
    for row in rows:
        bound = bounds.get((row["expert_dtype"], row["batch"]))
        if bound and key in row:
            row["share_of_bound"] = row[key] / bound
    return rows


def _name(cell: Cell) -> str:
    return f"{cell.system.name:20} {cell.expert_dtype:5} {cell.share:4.0%} batch {cell.batch}"


def _print(cell: Cell, result: Result) -> None:
    print(
        f"{_name(cell)}: prefill {result.prefill_tokens_per_second:8.0f} tok/s, first token "
        f"{result.time_to_first_token_seconds:6.3f} s, decode "
        f"{result.decode_tokens_per_second:7.1f} tok/s, hits {result.hit_rate:4.0%}, link "
        f"{result.link_gigabytes_per_second:5.1f} GB/s"
        + _predicted(result)
        + ("" if result.is_replaying else f" [not captured: {result.why_not}]")
    )
    step = result.lanes["step_seconds_while_profiled"]
    for processor in ("cpu", "gpu", "link"):
        share = min(1.0, result.lanes[f"{processor}_seconds"] / step) if step else 0.0
        print(
            f"    {processor:4} {'#' * round(share * BAR_CHARACTERS):{BAR_CHARACTERS}} {share:4.0%}"
        )
    sys.stdout.flush()


def _predicted(result: Result) -> str:
    """Return the simulator's forecast beside the measurement; the goal is a deviation of 15 %."""
    predicted = result.predicted_tokens_per_second
    if predicted is None:
        return ""
    off = predicted / result.decode_tokens_per_second - 1
    return f", predicted {predicted:7.1f} ({off:+.0%})"


def _link_speed() -> dict[str, float]:
    """Time pinned copies as the runtime makes them, of 2 MiB experts, and as one copy."""
    if not torch.cuda.is_available():
        return {}
    streams = CudaStreams()
    host, target = streams.pinned(LINK_BYTES), streams.empty(LINK_BYTES)
    size = 2 << 20
    pieces = [HostCopy(*piece) for piece in zip(target.split(size), host.split(size), strict=True)]

    def whole() -> None:
        target.copy_(host, non_blocking=True)

    def timed() -> float:
        first = streams.record(Stream.FETCH, is_timed=True)
        for piece in pieces:
            streams.copy(Stream.FETCH, [piece])
        last = streams.record(Stream.FETCH, is_timed=True)
        last.synchronize()
        return streams.between(first, last)

    best = min(streams.seconds(Stream.FETCH, whole) for _ in range(5))
    experts = min(timed() for _ in range(5))
    print(
        f"link: {LINK_BYTES / best / 1e9:.1f} GB/s in one piece; experts of 2 MiB get "
        f"{best / experts:.0%} of it"
    )
    return {
        "link_gigabytes_per_second": LINK_BYTES / best / 1e9,
        "share_of_link": best / experts,
    }


def _print_shares(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if "share_of_bound" in row:
            print(
                f"{row['system']:20} {row['expert_dtype']:5} {row['share']:4.0%} batch "
                f"{row['batch']}: {row['share_of_bound']:4.0%} of the fully resident speed"
            )


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "emulated"


def _peak_bytes() -> int:
    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0


if __name__ == "__main__":
    sys.exit(main())

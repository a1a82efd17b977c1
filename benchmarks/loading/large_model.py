"""Loads a model of a released shape with random weights, packed or as GGUF, and answers with it.

    python -m benchmarks.loading.large_model write DIR [--shape NAME] [--layers N]
    python -m benchmarks.loading.large_model write FILE.gguf [--quantisation Q4_K_M]
    python -m benchmarks.loading.large_model load DIR|FILE.gguf [--cold] [--tokens N]

`write` packs the weights of one layer for all layers, in little memory. `load` measures the time,
and the private memory of the process meanwhile, without mapped pages of files. `load --cold` first
drops the files from the page cache and times a plain read of all, then drops them again. A prompt
and tokens are timed as `tandem plan` does for its forecast, unless `--tokens 0`. The last line is
JSON.
"""

import argparse
import json
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `import tandem` sets it, here too late

from benchmarks.generation.gguf_file import write_random_gguf

import tandem
from tandem.bench.generation import WARM_UP_STEPS, Workload, measure
from tandem.bench.model_shapes import MODEL_SHAPES, ModelShape, find_shape
from tandem.bench.random_model import build_random_model
from tandem.checkpoint.mapped_files import let_go, read_ahead
from tandem.core.units import format_bytes
from tandem.experts.store.host_memory import process_bytes
from tandem.forecast.speed_forecast import PROMPT_TOKENS
from tandem.generate.generator import Generator
from tandem.hf.config import OffloadConfig
from tandem.hf.packed_layers import PackedModule
from tandem.hf.runtime import require_runtime

_ROUNDS = 3  # of a prompt and tokens; the first one also tells how the first tokens come


def write(directory: Path, shape: ModelShape, expert_dtype: str, dense_dtype: str = "none") -> None:
    """Write a shape's packed checkpoint."""
    offload = OffloadConfig(expert_dtype=expert_dtype)
    model = build_random_model(shape, offload, dense_dtype=dense_dtype, is_shared=True)
    tandem.save(model, directory)
    num_bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    print(f"{format_bytes(num_bytes)} in {directory}")


def load(flags: argparse.Namespace) -> None:
    """Time the load and an answer; print one JSON line last."""
    path, is_cold = flags.path, flags.cold
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    report: dict[str, Any] = {"bytes": total}
    if is_cold:
        let_go(files)
        begin = time.perf_counter()
        read_ahead(files, lambda count: None)
        report["raw_read_seconds"] = time.perf_counter() - begin
        let_go(files)
    begin, own_before = time.perf_counter(), memory_kinds()["rssanon_bytes"]
    with watching_memory() as seen:
        model = tandem.load(path, dense_dtype=flags.dense_dtype, threads=flags.threads)
    seconds = time.perf_counter() - begin
    report |= {"load_seconds": seconds, "gigabytes_per_second": total / seconds / 1e9}
    report["peak_own_bytes"] = max(seen) - own_before
    report["packed_bytes"] = _packed_bytes(model)
    report["resident_bytes_after_load"] = process_bytes()
    if is_cold:
        report["share_of_raw_read"] = report["raw_read_seconds"] / report["load_seconds"]
    if flags.tokens:
        report |= _answers(model, flags.tokens)
    print(json.dumps(report | memory_kinds()))


def _packed_bytes(model: Any) -> int:
    """Return the bytes of experts and other packed matrices; tied ones count once."""
    dense = {
        module.packed.matrix.data.data_ptr(): module.packed.num_bytes
        for module in model.modules()
        if isinstance(module, PackedModule)
    }
    return require_runtime(model).store.num_bytes + sum(dense.values())


@contextmanager
def watching_memory() -> Iterator[list[int]]:
    """Collect the process's private memory in bytes, every twentieth of a second."""
    seen, has_ended = [0], threading.Event()

    def watch() -> None:
        while not has_ended.wait(0.05):
            seen.append(memory_kinds()["rssanon_bytes"])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        has_ended.set()
        thread.join()


def _answers(model: Any, num_tokens: int) -> dict[str, Any]:
    """Return the times of a prompt and tokens, and the memory after them."""
    work = Workload(prompt_tokens=PROMPT_TOKENS, new_tokens=num_tokens)
    rounds = [measure(model, Generator(model), work) for _ in range(_ROUNDS)]
    first = rounds[0]
    return {
        "first_prefill_seconds": first.first_prefill_seconds,
        "first_tokens_per_second": WARM_UP_STEPS / first.warm_up_seconds,
        "prefill_seconds": median(x.time_to_first_token_seconds for x in rounds),
        "decode_tokens_per_second": median(x.speed.decode_tokens_per_second for x in rounds),
        "resident_bytes": process_bytes(),
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def memory_kinds() -> dict[str, int]:
    """Return the process's private memory and its mapped file pages in bytes."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("RssAnon", "RssFile")):
            name, number, _ = line.split()
            found[f"{name[:-1].lower()}_bytes"] = int(number) * 1024
    return found


def main() -> None:
    """Write or load, as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("action", choices=("write", "load"))
    parser.add_argument("path", type=Path, help="a directory, or a GGUF file")
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=sorted(MODEL_SHAPES))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--expert-dtype", default="int4")
    parser.add_argument("--quantisation", default="Q4_K_M", help="of a GGUF file")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--dense-dtype", default="none", help="of the load; packing takes time")
    flags = parser.parse_args()
    shape = find_shape(flags.shape)
    shape = shape.sample(flags.layers) if flags.layers else shape
    if flags.action == "load":
        load(flags)
    elif flags.path.suffix == ".gguf":
        write_random_gguf(flags.path, shape, int(shape.values["vocab_size"]), flags.quantisation)
    else:
        write(flags.path, shape, flags.expert_dtype)


if __name__ == "__main__":
    main()

"""A prompt's first token after a restart, from disk or not: python -m benchmarks.server.restart

The scheduler of `tandem serve --kv-disk` computes a prefix, writes it and is dropped; another one
finds it. Files are dropped from the page cache before, as far as the system allows. A shape with
fewer layers costs both sides equally less. The last line is JSON.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import tandem
from tandem.bench.model_shapes import find_shape
from tandem.bench.random_model import build_random_model
from tandem.generate.kept_prefixes import KeptPrefixes
from tandem.generate.request import Request
from tandem.generate.sampling import SamplingOptions
from tandem.generate.scheduler import Scheduler
from tandem.hf.config import OffloadConfig

_ROUNDS = 3


def first_token_seconds(scheduler: Scheduler, prompt: list[int]) -> tuple[float, int]:
    """Return the seconds to a prompt's first token, and how many of its tokens were reused."""
    options = SamplingOptions(max_new_tokens=1, temperature=0.0)
    begin = time.perf_counter()
    scheduler.add(Request(request_id=1, prompt=tuple(prompt), options=options))
    while True:
        for output in scheduler.step():
            return time.perf_counter() - begin, output.reused_tokens


def forget(directory: Path) -> int:
    """Drop files from the page cache; return their bytes."""
    num_bytes = 0
    for file in directory.glob("*/*.kv"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        num_bytes += file.stat().st_size
    return num_bytes


def load(options: argparse.Namespace) -> Any:
    """Return a checkpoint's model, or one of a released shape."""
    if options.model is not None:
        return tandem.load(options.model, expert_dtype="int4", dense_dtype="int8")
    shape = find_shape(options.shape)
    offload = OffloadConfig(expert_dtype="int4")
    return build_random_model(shape, offload, num_layers=options.layers)


def main() -> None:
    """Measure some rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a checkpoint's directory")
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8000)
    options = parser.parse_args()
    model = load(options)
    generator = tandem.Generator(model)
    prompt = [100 + i * 31 % 20_000 for i in range(options.tokens)]
    directory = Path(tempfile.mkdtemp(prefix="kv"))
    found: list[dict[str, float]] = []
    try:
        for _ in range(_ROUNDS):
            shutil.rmtree(directory)
            kept = KeptPrefixes(directory, 1 << 36)
            computing = generator.scheduler(1, chunk_tokens=256, kept=kept)
            computed, _ = first_token_seconds(computing, prompt)
            begin = time.perf_counter()
            computing.prefixes.close(600)
            written = time.perf_counter() - begin
            num_bytes = forget(directory)
            again = generator.scheduler(1, chunk_tokens=256, kept=kept)
            read, reused = first_token_seconds(again, prompt)
            again.prefixes.close(60)
            found.append({"computed_seconds": computed, "read_seconds": read,
                          "written_seconds": written, "bytes": num_bytes,
                          "reused_tokens": reused, "ratio": read / computed})  # fmt: skip
            print(", ".join(f"{name} {value:.4g}" for name, value in found[-1].items()))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    best = min(found, key=lambda one: one["ratio"])
    print(json.dumps({**vars(options), **best}))


if __name__ == "__main__":
    main()

"""Models larger than the memory: Tandem's slots, mapped files and other programs, in turns.

    python -m benchmarks.disk [--shape qwen3-30b-a3b] [--layers N] [--limits 12 8.5] [--json]
    python -m benchmarks.disk --routing data/traces/gpt-oss-20b.npz      # recorded, rearranged
    python -m benchmarks.disk --shape deepseek-v4-flash --experts 28 --expert-dtype mxfp4 \
        --dense-dtype fp8 --pack-dense                                   # cut to a size of a disk
    python -m benchmarks.disk --gguf MODEL.gguf --systems own-slots llama.cpp \
        --rival "ik_llama.cpp=/opt/ik/bin/llama-bench"

Writes a packed model with random weights into `--folder` (kept; by default a temporary one), and
measures each system in a process of its own, in a control group with each of the limits (GB, 1e9
bytes; page cache counts, no swap; needs root), after the model's files have left the page cache.
The folder keeps a note that the model's steps have passed their trial, as Tandem's cache does: only
its first start tries them. Systems go forwards and backwards (ABBA) `--rounds` times; what is
printed are medians over them.

- `slots`: experts come from the disk into slots in memory, as `tandem.load` decides by itself;
- `look-ahead`: as `slots`; the next layer's experts are predicted with `--accuracy`;
- `mapped`: the same files, mapped, experts in the page cache, as it was before;
- `own-slots`: as `slots`, with the routing that random weights have of themselves, as it is in
  other programs: `llama.cpp` (its library) and each `--rival`, a program that takes llama-bench's
  options; they map `--gguf`, a file of the same shape, without repacking;
- `fit`: so many layers that all fit, in slots and mapped in memory, in turns.

The routing of the others is forced (`benchmarks.disk.routing`). The disk's own rate is the best of
unbuffered reads of an expert's size at depth 1, 4 and 16, between the decode steps. The bound of a
step is the sum over layers of max(absent bytes / rate, residents' computing), and its dense parts.
Experts of layers that are routed by token are read ahead, and count as hits if they are on the way.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from benchmarks.disk.job import Job
from benchmarks.disk.memory_group import drop_from_page_cache, limited
from benchmarks.disk.report import lines
from benchmarks.loading.large_model import write

from tandem.bench.model_shapes import MODEL_SHAPES, ModelShape, find_shape
from tandem.bench.peers.llama_bench import parse_rival
from tandem.kernels.cpu import detect_cpu

SYSTEMS = ("slots", "look-ahead", "mapped", "own-slots", "llama.cpp", "fit")


def read_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or these words."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=sorted(MODEL_SHAPES))
    parser.add_argument("--layers", type=int, help="default: the shape's own")
    parser.add_argument("--experts", type=int, help="of a layer; default: the shape's own")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--expert-dtype", default="int4")
    parser.add_argument("--dense-dtype", default="int8")
    parser.add_argument(
        "--pack-dense", action="store_true", help="in the folder too, not only when it is loaded"
    )
    parser.add_argument("--folder", type=Path, help="of the packed model; kept")
    parser.add_argument("--limits", type=float, nargs="+", default=[12.0, 8.5], help="GB; 0: none")
    parser.add_argument("--expert-memory", default="auto", help="of slots; default: what is free")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["slots", "mapped", "fit"])
    parser.add_argument("--rounds", type=int, default=1, help="of ABBA")
    parser.add_argument("--forwards", action="store_true", help="each round forwards alone")
    parser.add_argument("--routing", default="synthetic", help="synthetic, or a trace's file")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--warm-up", type=int, default=96, help="steps")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--cold-prompt", type=int, default=256)
    parser.add_argument("--eviction", default="next-use")
    parser.add_argument("--threads", type=int, default=detect_cpu().num_threads)
    parser.add_argument("--accuracy", type=float, default=0.8, help="of look-ahead")
    parser.add_argument("--fit-layers", type=int, default=6)
    parser.add_argument("--gguf", type=Path, help="for other programs")
    parser.add_argument("--rival", type=parse_rival, action="append", default=[])
    parser.add_argument("--rival-steps", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="last line: one JSON document")
    return parser.parse_args(words)


def jobs_of(options: argparse.Namespace, folder: Path, shape: ModelShape) -> dict[str, Job]:
    """Return the jobs by system name."""
    values = shape.values
    job = Job(
        system="slots", folder=folder, num_layers=values["num_hidden_layers"],
        moe_layers=values["num_hidden_layers"] - values.get("first_k_dense_replace", 0),
        num_experts=values[_experts_key(shape)], top_k=values["num_experts_per_tok"],
        routing=options.routing, steps=options.steps, warm_up=options.warm_up,
        prompt=options.prompt, cold_prompt=options.cold_prompt, dense_dtype=options.dense_dtype,
        eviction=options.eviction, threads=options.threads, fit_layers=options.fit_layers,
        gguf=options.gguf, expert_memory=options.expert_memory,
    )  # fmt: skip
    own = {"own-slots": replace(job, routing="own")}
    jobs = {name: replace(job, system=name) for name in options.systems} | own
    other = replace(job, steps=options.rival_steps)
    if "look-ahead" in jobs:
        jobs["look-ahead"] = replace(jobs["look-ahead"], look_ahead=options.accuracy)
    if "llama.cpp" in jobs:
        jobs["llama.cpp"] = replace(other, system="llama.cpp")
    rivals = {name: replace(other, system="rival", command=words) for name, words in options.rival}
    if options.gguf is None and ("llama.cpp" in jobs or rivals):
        raise SystemExit("other programs read a GGUF file: name one with --gguf")
    return {name: jobs[name] for name in options.systems} | rivals


def _experts_key(shape: ModelShape) -> str:
    """Return the key for the number of experts in a shape's configuration."""
    keys = ("num_experts", "n_routed_experts", "num_local_experts")
    return next(key for key in keys if key in shape.values)


def cut_shape(options: argparse.Namespace) -> ModelShape:
    """Return the requested shape, with fewer layers, experts and token ids."""
    shape = find_shape(options.shape)
    shape = shape.sample(options.layers) if options.layers else shape
    values = shape.values | {"vocab_size": options.vocabulary}
    if options.experts:
        values[_experts_key(shape)] = options.experts
    return ModelShape(shape.model_type, values)


def run(job: Job, limit_bytes: int | None) -> dict[str, Any]:
    """Run a job in a process of its own; its result includes the number of out-of-memory kills."""
    for place in filter(None, (job.folder, job.gguf)):
        drop_from_page_cache(place)
    if limit_bytes is not None:
        warm_up_memory(limit_bytes)
    words = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(job).items()}
    with limited(limit_bytes) as group:
        command = [sys.executable, "-m", "benchmarks.disk.worker", json.dumps(words)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=False,
            preexec_fn=None if group is None else group.enter,
        )  # fmt: skip
        kills = 0 if group is None else group.kills()
    if done.returncode != 0:
        return {"failed": done.returncode, "kills": kills}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"kills": kills}


def warm_up_memory(num_bytes: int) -> None:
    """Allocate this much memory briefly, because a virtual machine may get it at only .5 GB/s."""
    program = "import sys, numpy; numpy.ones(int(sys.argv[1]), dtype=numpy.uint8)"
    subprocess.run([sys.executable, "-c", program, str(num_bytes)], check=True)


def packed_model(options: argparse.Namespace, shape: ModelShape) -> Path:
    """Return the directory of the packed model; write it if it does not exist."""
    folder: Path = options.folder or Path(mkdtemp(prefix="tandem-disk-"))
    layers, dense = shape.values["num_hidden_layers"], "none"
    name = f"{options.shape}-{layers}-{options.vocabulary}-{options.expert_dtype}"
    if options.experts:
        name += f"-{options.experts}-experts"
    if options.pack_dense:
        dense = options.dense_dtype
        name += f"-{dense}"
    packed = folder / name
    if not (packed / "config.json").exists():
        write(packed, shape, options.expert_dtype, dense)
    return packed


def main() -> None:
    """Measure and print; with --json the last line is JSON."""
    options = read_options()
    if any(options.limits) and os.geteuid() != 0:
        raise SystemExit("a control group with a memory limit is made by root; run this as root")
    shape = cut_shape(options)
    jobs = jobs_of(options, packed_model(options, shape), shape)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    if (fit := jobs.pop("fit", None)) is not None:
        found["all fit"] = {"fit": [run(fit, None)]}
    for limit in options.limits if jobs else []:
        rounds = found[f"{limit:g} GB"] = {name: [] for name in jobs}
        order = list(jobs)
        for _ in range(options.rounds):
            back = () if options.forwards or len(order) < 2 else reversed(order)
            for name in (*order, *back):
                rounds[name].append(run(jobs[name], int(limit * 1e9) or None))
                print(f"{limit:g} GB, {name}: done", file=sys.stderr, flush=True)
    print("\n".join(lines(found, fit)))
    if options.json:
        setting = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
        print(json.dumps({"setting": setting, "found": found}))


if __name__ == "__main__":
    main()

"""Tandem and its peers on the same file or shape, in turns.

    python -m benchmarks.generation.against_peers --layers 4 --vocabulary 32000
    python -m benchmarks.generation.against_peers --file Qwen3-30B-A3B-Q4_K_M.gguf --one-at-a-time
    python -m benchmarks.generation.against_peers --layers 4 --vocabulary 32000 \
        --systems tandem llama.cpp torch --rival "ik_llama.cpp=/opt/ik/bin/llama-bench -rtr 1"

Without `--file` a GGUF of the shape is written with random weights and kept in `--directory`.
`tandem` reads that file as the others do; `packed` is Tandem with its own `--expert-dtype` and
`--dense-dtype`; `torch` is Transformers in bf16, of a shape. A rival is a program that takes the
options of llama-bench. Each system is a process of its own, which stands still while another is
timed; systems that do not fit into memory together are measured `--one-at-a-time`. A ratio is the
median over rounds of turns next to each other. Needs the packages gguf and llama-cpp-python.

TANDEM_ISA gives Tandem and its ceilings another instruction set, and limits torch to it. llama.cpp
has the one that its library was compiled for, which the table then names; a library for AVX2 is
`CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON
-DGGML_BMI2=ON" pip install --no-binary llama-cpp-python llama-cpp-python`.
"""

import argparse
import json
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import gettempdir

from benchmarks.generation.gguf_file import SHAPES, random_gguf
from benchmarks.generation.systems import SYSTEMS, ShapeSetting

from tandem.bench.generation import measure_machine
from tandem.bench.kernels import KernelBench
from tandem.bench.model_shapes import find_shape
from tandem.bench.peers.llama_bench import LlamaBench, parse_rival
from tandem.bench.peers.llama_cpp import llama_cpp_isa
from tandem.bench.peers.turns import Maker, measure_rounds, median, ratios, table
from tandem.kernels.cpu import detect_cpu
from tandem.kernels.engine import choose_isa


def rival(text: str) -> tuple[str, Maker]:
    """Parse `NAME=PROGRAM ARGUMENTS`."""
    name, words = parse_rival(text)
    return name, partial(LlamaBench, words)


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", type=Path, help="a GGUF file; default: one of --shape is written")
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, help="default: the shape's own")
    parser.add_argument("--depth", type=int, nargs="+", default=[0])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=detect_cpu().num_threads)
    parser.add_argument("--expert-dtype", default="int4", help="of the system `packed`")
    parser.add_argument("--dense-dtype", default="int4", help="of the system `packed`")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--quantisation", default="Q4_0", help="of the GGUF: a type, or Q4_K_M")
    parser.add_argument("--flash-attention", action="store_true", help="llama.cpp's; slower here")
    parser.add_argument("--no-repacking", action="store_true", help="llama.cpp: as the file has it")
    parser.add_argument("--one-at-a-time", action="store_true")
    parser.add_argument(
        "--systems", nargs="+", choices=list(SYSTEMS), default=["tandem", "packed", "llama.cpp"]
    )
    parser.add_argument("--rival", type=rival, action="append", default=[], help="NAME=LLAMA_BENCH")
    parser.add_argument("--directory", type=Path, default=Path(gettempdir()))
    return parser.parse_args()


def setting_of(options: argparse.Namespace) -> ShapeSetting:
    """Return the compared file and workload; write a file of random weights if none is named."""
    shape = find_shape(options.shape)
    vocabulary = options.vocabulary or shape.values["vocab_size"]
    file = options.file or random_gguf(
        options.directory, options.shape, options.layers, vocabulary, options.quantisation
    )
    return ShapeSetting(
        shape=options.shape, layers=options.layers, vocabulary=vocabulary, threads=options.threads,
        prompt=options.prompt, steps=options.steps, expert_dtype=options.expert_dtype,
        dense_dtype=options.dense_dtype, kv_dtype=options.kv_dtype, gguf=file,
        has_flash_attention=options.flash_attention, may_repack=not options.no_repacking,
        isa=choose_isa(os.environ.get("TANDEM_ISA", "")),
    )  # fmt: skip


def limit_torch(isa: str) -> None:
    """Limit torch to an instruction set in processes that start after this call."""
    if isa in ("avx2", "avxvnni"):
        os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    elif isa == "portable":
        os.environ |= {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}


def named(system: str, setting: ShapeSetting) -> str:
    """Return a system's name in the table; for llama.cpp with instruction set and layout."""
    if system != "llama.cpp":
        return system
    layout = "its layouts" if setting.may_repack else "the file's blocks"
    return f"{system} ({llama_cpp_isa()}, {layout})"


def print_ceiling(bench: KernelBench, when: str) -> None:
    """Measure and print the machine's ceilings."""
    ceiling = measure_machine(bench)
    text = ", ".join(
        f"{name.replace('_', ' ')} {value:.1f}" for name, value in asdict(ceiling).items()
    )
    print(f"machine at best {when}: {text}", flush=True)


def main() -> None:
    """Measure and print; the last line is JSON."""
    options = read_options()
    setting = setting_of(options)
    limit_torch(setting.isa)
    bench = KernelBench(num_threads=options.threads, isa=setting.isa)
    print_ceiling(bench, "before")
    makers: dict[str, Maker] = {named(name, setting): SYSTEMS[name] for name in options.systems}
    makers |= dict(options.rival)
    groups = [{n: m} for n, m in makers.items()] if options.one_at_a_time else [makers]
    try:
        found = measure_rounds(groups, setting, options.depth, options.rounds)
    except OSError as error:
        raise SystemExit(f"stopped: {error}") from error
    print_ceiling(bench, "afterwards")
    print("\n".join(table(found, options.depth)))
    what = setting.gguf.name if options.file else f"{options.shape}, {options.layers} layers"
    first = next(iter(found))
    report = [
        {
            "system": name,
            "depth": depth,
            **asdict(median(speeds)),
            "ratios": ratios(found[first][depth], speeds),  # of the first system over it
        }
        for name, rounds in found.items()
        for depth, speeds in rounds.items()
    ]
    print(json.dumps({"file": setting.gguf.name, "what": what, "speeds": report}))


if __name__ == "__main__":
    main()

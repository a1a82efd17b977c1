"""llama.cpp on the same shape at equal GPU memory: a share of its experts on the GPU, in Q4_0.

    python -m benchmarks.gpu.llama_cpp --shape qwen3-30b-a3b --shares 0.5 1.0 \\
        --rival "llama.cpp=/opt/llama.cpp/bin/llama-bench"

Random weights, 4.5 bits each as Tandem's int4: what is timed does not depend on them. A rival is a
program with llama-bench's options; experts of so many layers are left to its CPU (`-ncmoe`).
Without one it is llama-cpp-python, whole layers at a time. Needs the package gguf, and a rival or
llama-cpp-python built for CUDA; where one is missing that is said, and nothing fails. The last line
is one JSON document.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tandem.bench.model_shapes import MODEL_SHAPES, find_shape
from tandem.bench.peers.llama_bench import LlamaBench, parse_rival
from tandem.bench.peers.setting import Setting, Speeds
from tandem.kernels.cpu import detect_cpu

QUANTISATION = "Q4_0"
_OWN = ("llama.cpp", ())  # the package


def main() -> int:
    """Time prefill and decode; return the exit code."""
    parser = argparse.ArgumentParser(description="Time llama.cpp at equal GPU memory.")
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=sorted(MODEL_SHAPES))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 1.0])
    parser.add_argument("--layers", type=int, help="cut the shape to so many layers")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--threads", type=int, default=detect_cpu().num_threads)
    parser.add_argument("--rival", type=parse_rival, action="append", default=[])
    parser.add_argument("--without-gpu", action="store_true", help="try this script without one")
    options = parser.parse_args()
    why = _why_not(options)
    if why is not None:
        print(f"llama.cpp is not compared: {why}")
        print(json.dumps({"shape": options.shape, "missing": why}))
        return 0
    rows = _measure(options)
    print(json.dumps({"shape": options.shape, "quantisation": QUANTISATION, "cells": rows}))
    return 0


def _why_not(options: argparse.Namespace) -> str | None:
    if importlib.util.find_spec("gguf") is None:
        return "the package gguf is not installed"
    from benchmarks.generation.gguf_file import SHAPES

    if options.shape not in SHAPES:
        return f"GGUF files are written of {', '.join(SHAPES)} alone"
    if options.rival:
        return None
    if importlib.util.find_spec("llama_cpp") is None:
        return "there is no --rival, and the package llama-cpp-python is not installed"
    import llama_cpp

    if not (llama_cpp.llama_supports_gpu_offload() or options.without_gpu):
        return "llama-cpp-python is built without CUDA"
    return None


def _measure(options: argparse.Namespace) -> list[dict[str, str | float]]:
    from benchmarks.generation.gguf_file import write_random_gguf

    shape = find_shape(options.shape)
    layers = options.layers or shape.values["num_hidden_layers"]
    rows = []
    with TemporaryDirectory() as folder:
        file = Path(folder) / "random.gguf"
        write_random_gguf(file, shape.sample(layers), options.vocabulary, QUANTISATION)
        setting = Setting(
            gguf=file, threads=options.threads, prompt=options.prompt_tokens, steps=options.steps,
            has_flash_attention=True,
        )  # fmt: skip
        for share in options.shares:
            for name, command in options.rival or [_OWN]:
                try:
                    on_gpu = 0 if options.without_gpu else round(share * layers)
                    speeds = _speeds(setting, on_gpu, layers, command)
                except OSError as error:
                    print(f"{name:20} {share:4.0%}: failed: {error}", flush=True)
                    continue
                print(
                    f"{name:20} {QUANTISATION:5} {share:4.0%} batch 1: prefill "
                    f"{speeds.prefill:8.0f} tok/s, decode {speeds.decode:7.1f} tok/s",
                    flush=True,
                )
                rows.append(
                    {
                        "system": name, "share": share,
                        "prefill_tokens_per_second": speeds.prefill,
                        "decode_tokens_per_second": speeds.decode,
                    }
                )  # fmt: skip
    return rows


def _speeds(setting: Setting, on_gpu: int, layers: int, command: Sequence[str]) -> Speeds:
    """Time a program, or the package, with some layers' experts on the GPU; 0: without one."""
    if command:
        options = ["-ngl", "99" if on_gpu else "0", "-ncmoe", str(layers - on_gpu)]
        return LlamaBench([*command, *options], setting).measure(0)
    from tandem.bench.peers.llama_cpp import LlamaCpp

    return LlamaCpp(setting, on_gpu + (on_gpu == layers)).measure(0)  # with the head


if __name__ == "__main__":
    sys.exit(main())

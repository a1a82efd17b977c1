"""llama.cpp on the same shape at equal GPU memory: a share of its layers on the GPU, 4.5 bits each.

    python -m benchmarks.gpu.llama_cpp --shape qwen3-30b-a3b --shares 0.5 1.0

Random weights in Q4_0, as Tandem's int4: what is timed does not depend on them. Needs the packages
gguf and llama-cpp-python, the latter built for CUDA; where one is missing that is said, and nothing
fails. The last line is one JSON document.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tandem.bench.model_shapes import MODEL_SHAPES, find_shape
from tandem.kernels.cpu import detect_cpu

QUANTISATION = "Q4_0"


def main() -> int:
    """Time prefill and decode; returns the exit code."""
    parser = argparse.ArgumentParser(description="Time llama.cpp at equal GPU memory.")
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=sorted(MODEL_SHAPES))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 1.0])
    parser.add_argument("--layers", type=int, help="cut the shape to so many layers")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--threads", type=int, default=detect_cpu().num_threads)
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
    for name, package in (("gguf", "gguf"), ("llama_cpp", "llama-cpp-python")):
        if importlib.util.find_spec(name) is None:
            return f"the package {package} is not installed"
    import llama_cpp
    from benchmarks.generation.gguf_file import SHAPES

    if options.shape not in SHAPES:
        return f"GGUF files are written of {', '.join(SHAPES)} alone"

    if not (llama_cpp.llama_supports_gpu_offload() or options.without_gpu):
        return "llama-cpp-python is built without CUDA"
    return None


def _measure(options: argparse.Namespace) -> list[dict[str, float]]:
    from benchmarks.generation.gguf_file import write_random_gguf
    from benchmarks.generation.systems import LlamaCpp, Setting

    shape = find_shape(options.shape)
    layers = options.layers or shape.values["num_hidden_layers"]
    rows = []
    with TemporaryDirectory() as folder:
        file = Path(folder) / "random.gguf"
        write_random_gguf(file, shape.sample(layers), options.vocabulary, QUANTISATION)
        setting = Setting(
            shape=options.shape, layers=layers, vocabulary=options.vocabulary,
            threads=options.threads, prompt=options.prompt_tokens, steps=options.steps,
            expert_dtype="", dense_dtype="", kv_dtype="", gguf=file, has_flash_attention=True,
        )  # fmt: skip
        for share in options.shares:
            on_gpu = 0 if options.without_gpu else layers + 1 if share == 1 else int(share * layers)
            speeds = LlamaCpp(setting, on_gpu).measure(0)
            print(
                f"llama.cpp            {QUANTISATION:5} {share:4.0%} batch 1: prefill "
                f"{speeds.prefill:8.0f} tok/s, decode {speeds.decode:7.1f} tok/s, "
                f"{on_gpu} of {layers} layers on the GPU",
                flush=True,
            )
            rows.append(
                {
                    "share": share, "prefill_tokens_per_second": speeds.prefill,
                    "decode_tokens_per_second": speeds.decode,
                }
            )  # fmt: skip
    return rows


if __name__ == "__main__":
    sys.exit(main())

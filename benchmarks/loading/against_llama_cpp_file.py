"""Tandem against llama.cpp on the same GGUF files: weights, answers and speed, by type.

    python -m benchmarks.loading.against_llama_cpp_file [--types Q4_K IQ4_XS ...] [--layers N]

The demo model, padded so that its rows are whole blocks of 256, is quantised to each type by
llama.cpp's own library. Then it compares: (a) the weights that Tandem decodes with ggml's
reference, bit by bit; (b) the divergence of each system's answers from those of the fp32 model of
these weights, and (c) its perplexity, on text; (d) prefill and decode, in turns. The last line is
JSON. Needs the packages gguf and llama-cpp-python.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.loading.ggml import Ggml, kinds_of
from benchmarks.loading.padded_demo import write_padded
from torch import Tensor
from transformers import AutoTokenizer

import tandem
from tandem.bench.generation import Workload, measure
from tandem.bench.kernels import KernelBench
from tandem.bench.peers.llama_cpp import LlamaCpp
from tandem.bench.peers.setting import Setting
from tandem.checkpoint.sources.gguf_header import read_header
from tandem.cli.model_choice import ModelChoice, find_model
from tandem.generate.generator import Generator
from tandem.hf.runtime import require_runtime
from tandem.kernels.cpu import detect_cpu

TEXT = Path(__file__).parents[2] / "tests" / "data" / "wikitext_4096.txt"

TYPES = (
    "Q4_K_M", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL",
    "IQ4_XS", "MXFP4", "NVFP4", "IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S",
)  # fmt: skip
WINDOW = 500
_STEPS, _PROMPT = 32, 512


@torch.inference_mode()
def answers(model: Any, windows: Tensor) -> list[Tensor]:
    """Return the logits of each window: (tokens, vocabulary) fp32."""
    return [model(input_ids=ids[None]).logits[0].float() for ids in windows]


def generated_logits(model: Any, windows: Tensor) -> list[Tensor]:
    """Return the logits of a generator: native, with its default KV cache."""
    generator = Generator(model, threads=require_runtime(model).threads)
    return [
        generator.slot_pool(1, capacity=len(ids)).prefill_with_logits(0, ids.tolist()).float()
        for ids in windows
    ]


def divergence(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the mean over tokens of KL(expected, found)."""
    pairs = zip(found, expected, strict=True)
    each = [
        F.kl_div(ours.log_softmax(-1), true.log_softmax(-1), reduction="sum", log_target=True)
        for ours, true in pairs
    ]
    return float(sum(each)) / sum(map(len, expected))


def perplexity(logits: list[Tensor], windows: Tensor) -> float:
    """Return the perplexity of the windows' text."""
    pairs = zip(logits, windows, strict=True)
    loss = [F.cross_entropy(each[:-1], ids[1:], reduction="sum") for each, ids in pairs]
    return math.exp(float(sum(loss)) / (windows.numel() - len(windows)))


def differing_weights(file: Path, model: Any, ggml: Ggml) -> int:
    """Return how many of the experts' weights differ from ggml's reference."""
    tensors, count = read_header(file).tensors, 0
    for number, layer in enumerate(require_runtime(model).store):
        parts = [tensors[f"blk.{number}.ffn_{n}_exps.weight"] for n in ("gate", "up", "down")]
        decoded = [
            torch.from_numpy(ggml.dequantize(np.array(part.data), part.tensor_type))
            for part in parts
        ]
        for expert in range(decoded[0].shape[0]):
            found = layer.weights(expert)
            expected = torch.cat([decoded[0][expert], decoded[1][expert]])
            count += int((found.up != expected).sum() + (found.down != decoded[2][expert]).sum())
    return count


def speeds(model: Any, theirs: LlamaCpp, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return both systems' prefill and decode in tokens per second, measured in turns."""
    bench = KernelBench(num_threads=threads)
    generator = Generator(model, threads=require_runtime(model).threads)
    work = Workload(prompt_tokens=_PROMPT, new_tokens=_STEPS, depth=0)
    found: dict[str, list[tuple[float, float]]] = {"tandem": [], "llama.cpp": []}
    for _ in range(rounds):
        ours = measure(model, generator, work, bench).speed
        found["tandem"].append((ours.prefill_tokens_per_second, ours.decode_tokens_per_second))
        speed = theirs.measure(0)
        found["llama.cpp"].append((speed.prefill, speed.decode))
    return {
        name: {"prefill": median(x for x, _ in each), "decode": median(x for _, x in each)}
        for name, each in found.items()
    }


def compare(name: str, arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Return the comparison of one type."""
    demo = Path(find_model(ModelChoice(model="demo"), quiet=True).model)
    ggml, file = Ggml(), scratch / f"{name}.gguf"
    write_padded(file, demo, kinds_of(name, arguments.layers), ggml, arguments.layers)
    ids = AutoTokenizer.from_pretrained(demo)(TEXT.read_text(encoding="utf-8"))["input_ids"]
    count = arguments.tokens // WINDOW
    windows = torch.tensor(ids[: count * WINDOW]).view(count, WINDOW)
    threads = arguments.threads
    true_model = tandem.load(file, dtype="fp32", expert_dtype="fp32", threads=threads)
    expected = answers(true_model, windows)
    del true_model
    model = tandem.load(file, dtype=arguments.dtype, dense_dtype="auto", threads=threads)
    report: dict[str, Any] = {
        "type": name,
        "file_bytes": file.stat().st_size,
        "differing_weights": differing_weights(file, model, ggml),
        "perplexity": {"fp32": perplexity(expected, windows)},
        "divergence": {},
    }
    setting = Setting(
        gguf=file, threads=threads, prompt=_PROMPT, steps=_STEPS, has_flash_attention=True,
        may_repack=not arguments.no_repacking,
    )  # fmt: skip
    theirs = LlamaCpp(setting)
    for system, found in (
        ("tandem", generated_logits(model, windows)),
        ("llama.cpp", [torch.from_numpy(theirs.answers(ids)) for ids in windows.tolist()]),
    ):
        report["perplexity"][system] = perplexity(found, windows)
        report["divergence"][system] = divergence(found, expected)
    if arguments.rounds:
        report["tokens_per_second"] = speeds(model, theirs, threads, arguments.rounds)
    file.unlink()
    return report


def main() -> None:
    """Compare and print a line for each type; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=TYPES)
    parser.add_argument("--dtype", default="auto", help="of Tandem's values between layers")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3, help="of speed; 0 for none")
    parser.add_argument(
        "--no-repacking", action="store_true",
        help="let llama.cpp read the file's blocks as they are",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=detect_cpu().num_threads)
    arguments = parser.parse_args()
    reports = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.types:
            report = compare(name, arguments, Path(scratch))
            reports.append(report)
            print(_line(report), flush=True)
    print(json.dumps(reports))


def _line(report: dict[str, Any]) -> str:
    kl, text = report["divergence"], report["perplexity"]
    off = {name: value / text["fp32"] - 1 for name, value in text.items()}
    line = (
        f"{report['type']:8} differing weights {report['differing_weights']}, "
        f"KL {kl['tandem']:.5f} ({kl['tandem'] / kl['llama.cpp']:.2f} of llama.cpp's), "
        f"perplexity {off['tandem']:+.2%} of fp32's {text['fp32']:.3f} "
        f"(llama.cpp {off['llama.cpp']:+.2%})"
    )
    if found := report.get("tokens_per_second"):
        ours, theirs = found["tandem"], found["llama.cpp"]
        shares = {kind: ours[kind] / theirs[kind] for kind in ours}
        line += f", prefill {shares['prefill']:.2f}, decode {shares['decode']:.2f} of llama.cpp's"
    return line


if __name__ == "__main__":
    main()

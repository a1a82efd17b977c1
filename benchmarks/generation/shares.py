"""A shape's shares of its ceilings over another shape's, in turns.

    python -m benchmarks.generation.shares --shape deepseek-v4-flash

Decode is relative to the bytes that its step touches, a prompt to its multiplications. A lower
share than the other shape's is the cost of the model's own operations. Both have random weights in
real sizes and the same formats, and as many layers as `--memory` holds (of the other shape at most
`--over-layers`). Each is a process of its own, which is stopped while the other one is timed.
Ratios are medians over rounds of adjacent turns.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from benchmarks.generation.systems import ShapeSetting
from benchmarks.generation.systems.tandem_model import PackedTandem

from tandem.bench.model_shapes import ModelShape, find_shape
from tandem.bench.peers.setting import Speeds
from tandem.bench.peers.turns import measure_rounds, median
from tandem.bench.random_model import empty_model_of
from tandem.core.units import format_bytes, parse_bytes
from tandem.forecast.sizes import config_sizes
from tandem.hf.config import OffloadConfig
from tandem.hf.dense import is_tower
from tandem.kernels.cpu import detect_cpu
from tandem.kernels.engine import choose_isa


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="deepseek-v4-flash")
    parser.add_argument("--over", default="qwen3-30b-a3b", help="the other shape")
    parser.add_argument(
        "--memory", type=parse_bytes, default="10GB", help="of both models' weights"
    )
    parser.add_argument("--over-layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--depth", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=detect_cpu().num_threads)
    parser.add_argument("--expert-dtype", default="mxfp4")
    parser.add_argument("--dense-dtype", default="int8")
    parser.add_argument("--kv-dtype", default="auto")
    return parser.parse_args()


def weight_bytes(setting: ShapeSetting, shape: ModelShape, layers: int) -> int:
    """Return the bytes of this many layers of a shape, with embeddings and head."""
    model = empty_model_of(shape.sample(layers), setting.vocabulary)
    offload = OffloadConfig(expert_dtype=setting.expert_dtype, dense_dtype=setting.dense_dtype)
    sizes = config_sizes(model.config, offload)
    towers = sum(
        weight.nbytes for name, weight in model.named_parameters() if is_tower(name)
    )  # which are not built
    return int(sizes.experts_bytes + sizes.total_dense_bytes - towers)


def layers_within(num_bytes: int, most: int, bytes_of: Callable[[int], int]) -> int:
    """Return how many layers, at most `most`, fit in this memory; `SystemExit` if none does."""
    if bytes_of(1) > num_bytes:
        raise SystemExit(
            f"one layer takes {format_bytes(bytes_of(1))} and {format_bytes(num_bytes)} are left; "
            "give more as --memory"
        )
    layers = 1
    while layers < most and bytes_of(layers + 1) <= num_bytes:
        layers += 1
    return layers


def of_shape(shape: str, layers: int, setting: ShapeSetting) -> PackedTandem:
    """Load a shape into memory."""
    return PackedTandem(replace(setting, shape=shape, layers=layers))


def shares(speeds: Speeds) -> tuple[float, float]:
    """Return the shares of the ceilings of prefill and decode."""
    return speeds.prefill / speeds.prefill_ceiling, speeds.decode / speeds.decode_ceiling


def ratios(ours: Sequence[Speeds], theirs: Sequence[Speeds]) -> tuple[float, float]:
    """Return both shares over another shape's: medians over the rounds."""
    pairs = [(shares(a), shares(b)) for a, b in zip(ours, theirs, strict=True)]
    prefill, decode = (statistics.median(a[i] / b[i] for a, b in pairs) for i in range(2))
    return prefill, decode


def main() -> None:
    """Measure and print; the last line is JSON."""
    options = read_options()
    setting = ShapeSetting(
        shape=options.over, layers=options.over_layers, vocabulary=options.vocabulary,
        threads=options.threads, prompt=options.prompt, steps=options.steps,
        expert_dtype=options.expert_dtype, dense_dtype=options.dense_dtype,
        kv_dtype=options.kv_dtype, gguf=Path(), has_flash_attention=False,
        isa=choose_isa(os.environ.get("TANDEM_ISA", "")),
    )  # fmt: skip
    shape, over = find_shape(options.shape), find_shape(options.over)
    left = options.memory - weight_bytes(setting, over, options.over_layers)
    most = shape.values["num_hidden_layers"]
    layers = layers_within(left, most, partial(weight_bytes, setting, shape))
    names = {options.shape: layers, options.over: options.over_layers}
    for name, count in names.items():
        size = format_bytes(weight_bytes(setting, find_shape(name), count))
        print(f"{name}: {count} layers, {size}: {find_shape(name).sample(count).kinds}", flush=True)
    makers = {name: partial(of_shape, name, count) for name, count in names.items()}
    try:
        found = measure_rounds([makers], setting, options.depth, options.rounds)
    except OSError as error:
        raise SystemExit(f"stopped: {error}") from error
    report = []
    for depth in options.depth:
        ours, theirs = (found[name][depth] for name in names)
        prefill, decode = ratios(ours, theirs)
        print(f"depth {depth}: shares over its: prefill {prefill:.2f}, decode {decode:.2f}")
        medians = {name: asdict(median(found[name][depth])) for name in names}
        report.append({"depth": depth, "prefill": prefill, "decode": decode, "speeds": medians})
    print(json.dumps({"layers": names, "prompt": options.prompt, "shares": report}))


if __name__ == "__main__":
    main()

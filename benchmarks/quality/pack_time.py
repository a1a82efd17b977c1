"""The time of packing with importance over that without, in turns.

    python -m benchmarks.quality.pack_time --formats int4 q4_k

Two of the 48 layers of Qwen3-30B-A3B, with all 128 experts, random weights and random importance.
They take 2.5 GB of the temporary directory, the packed model .7 GB more. The last line is JSON.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from benchmarks.quality.mixed_speed import random_model
from transformers.utils.logging import disable_progress_bar

import tandem
from tandem.checkpoint.importance import save_importance
from tandem.checkpoint.input_squares import InputSquares

_LAYERS_OF_ALL = 48


class Taken(NamedTuple):
    """The seconds of one packing."""

    wall: float
    processor: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", default=["int4", "q4_k"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    disable_progress_bar()
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        model, importance = Path(folder) / "model", Path(folder) / "importance"
        write_model(model, importance, options.layers)
        for name in options.formats:
            found = _in_turns(model, importance, name, options.rounds)
            report[name] = _summary(found, options.layers)
            print(name, report[name], flush=True)
    print(json.dumps(report))


def write_model(directory: Path, importance: Path, num_layers: int) -> None:
    """Write random weights, and log-normal mean squares of inputs."""
    model = random_model(num_layers, num_experts=128)
    model.save_pretrained(directory)
    squares = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            count = len(parameter) if parameter.ndim > 2 else 1
            drawn = torch.randn(count, parameter.shape[-1]).exp()
            squares[name] = InputSquares(drawn, torch.full((count,), 4096))
    save_importance(importance, squares)


def _in_turns(model: Path, importance: Path, name: str, rounds: int) -> dict[str, list[Taken]]:
    found: dict[str, list[Taken]] = {"without": [], "with": []}
    for _ in range(rounds):
        for case, importance_path in (("without", None), ("with", str(importance))):
            found[case].append(_pack_once(model, importance_path, name))
    return found


def _pack_once(model: Path, importance: str | None, name: str) -> Taken:
    target = model.with_name("packed")
    begin, used = time.perf_counter(), _processor()
    tandem.pack(model, target, expert_dtype=name, importance=importance)
    taken = Taken(time.perf_counter() - begin, _processor() - used)
    shutil.rmtree(target)
    return taken


def _processor() -> float:
    times = os.times()
    return times.user + times.system


def _summary(found: dict[str, list[Taken]], num_layers: int) -> dict[str, float]:
    def of(case: str, field: str) -> float:
        return float(median(getattr(taken, field) for taken in found[case]))

    share = _LAYERS_OF_ALL / num_layers
    return {
        "with_over_without": of("with", "wall") / of("without", "wall"),
        "processor_with_over_without": of("with", "processor") / of("without", "processor"),
        "seconds_without": of("without", "wall"),
        "seconds_with": of("with", "wall"),
        "processor_minutes_of_all_layers": of("with", "processor") * share / 60,
    }


if __name__ == "__main__":
    main()

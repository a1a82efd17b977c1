"""The first load of a bf16 checkpoint as int4, over the longer of reading and quantising it.

    python -m benchmarks.loading.first_load write DIR [--shape NAME] [--layers N]
    python -m benchmarks.loading.first_load measure DIR [--rounds 3] [--expert-dtype int4]

`write` makes a checkpoint of a released shape's first layers with random weights, one tensor per
expert, as Transformers would. `measure` times in turns: a plain read of its files, which are
dropped from the page cache first; the quantiser alone, on as many weights in memory; and a load,
after the files are dropped again. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `import tandem` sets it, here too late

import torch
from safetensors.torch import save_file

import tandem
from tandem.bench.model_shapes import MODEL_SHAPES, find_shape
from tandem.bench.random_model import empty_model_of
from tandem.checkpoint.mapped_files import let_go, read_ahead
from tandem.kernels.formats import PackedMatrix, find_format
from tandem.kernels.formats.packed import write_weight

_VOCABULARY = 32_000
_STD = 0.02


def write(directory: Path, shape_name: str, num_layers: int) -> None:
    """Write a checkpoint, one file per layer."""
    shape = find_shape(shape_name).sample(num_layers)
    model = empty_model_of(shape, _VOCABULARY)
    config = model.config
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    directory.mkdir(parents=True)
    config.save_pretrained(directory)
    places: dict[str, str] = {}
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in model.state_dict().items():
        part = name.split(".layers.")[1].split(".")[0] if ".layers." in name else "dense"
        files.setdefault(f"model-{part}.safetensors", {}).update(_source_tensors(name, parameter))
    for file, shapes in files.items():
        tensors = {
            n: torch.empty(t.shape, dtype=t.dtype).normal_(0, _STD) for n, t in shapes.items()
        }
        save_file(tensors, directory / file, {"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _source_tensors(name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a parameter in the form of released files: fused experts as separate tensors."""
    if ".experts." not in name:
        return {name: parameter}
    base, _, kind = name.rpartition(".")
    if kind == "down_proj":
        return {f"{base}.{e}.down_proj.weight": t for e, t in enumerate(parameter)}
    parts: dict[str, torch.Tensor] = {}
    for e, both in enumerate(parameter):
        gate, up = both.chunk(2)
        parts |= {f"{base}.{e}.gate_proj.weight": gate, f"{base}.{e}.up_proj.weight": up}
    return parts


def measure(directory: Path, rounds: int, expert_dtype: str) -> None:
    """Time all three in turns and print."""
    files = sorted(directory.glob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    taken: dict[str, list[float]] = {"read": [], "quantise": [], "load": []}
    tandem.load(directory, expert_dtype=expert_dtype)  # imports the model's code
    for _ in range(rounds):
        let_go(files)
        taken["read"].append(_seconds(lambda: read_ahead(files, lambda _: None)))
        taken["quantise"].append(_quantise_seconds(num_bytes // 2, expert_dtype))
        let_go(files)
        taken["load"].append(_seconds(lambda: tandem.load(directory, expert_dtype=expert_dtype)))
        print({name: round(seconds[-1], 2) for name, seconds in taken.items()}, flush=True)
    rows = zip(taken["read"], taken["quantise"], taken["load"], strict=True)
    over = [load / max(read, quantise) for read, quantise, load in rows]
    medians = {f"{name}_seconds": statistics.median(values) for name, values in taken.items()}
    print(f"{num_bytes / 1e9:.1f} GB, load over the longer: " + " ".join(f"{x:.2f}" for x in over))
    print(json.dumps(medians | {"bytes": num_bytes, "over_longer": statistics.median(over)}))


def _quantise_seconds(num_weights: int, expert_dtype: str) -> float:
    """Return the quantiser's seconds for this many weights, in equal matrices."""
    rows, cols = 6144, 2048
    weights = (torch.randn(rows, cols) * _STD).bfloat16()
    packed = PackedMatrix.empty(rows, cols, find_format(expert_dtype))
    work = partial(write_weight, packed.blocks, packed.format, weights)
    work()
    once = statistics.median(_seconds(work) for _ in range(9))
    return once * num_weights / weights.numel()


def _seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Write or measure, as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("directory", type=Path)
    writing.add_argument("--shape", default="qwen3-30b-a3b", choices=sorted(MODEL_SHAPES))
    writing.add_argument("--layers", type=int, default=3)
    measuring = commands.add_parser("measure")
    measuring.add_argument("directory", type=Path)
    measuring.add_argument("--rounds", type=int, default=3)
    measuring.add_argument("--expert-dtype", default="int4")
    flags = parser.parse_args()
    if flags.command == "write":
        write(flags.directory, flags.shape, flags.layers)
    else:
        measure(flags.directory, flags.rounds, flags.expert_dtype)


if __name__ == "__main__":
    main()

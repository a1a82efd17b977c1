"""Released shapes by architecture: memory, decode speed, and its share of the bytes' ceiling.

    python -m benchmarks.generation.released inkling minimax_m3_vl --write
    python -m benchmarks.generation.released --write

Real sizes with random weights, four layers: fewer if `--memory` cannot hold them, and if it cannot
hold two, half or a quarter of the experts. Decode is relative to the bytes that its step touches,
in turns with Qwen3-MoE, as in `shares`. Without names all shapes without a row are tried; `--write`
writes each row into docs/models.md at once.
"""

import argparse
import json
import os
import re
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.generation.released_shapes import RELEASED, Released, num_experts, with_experts
from benchmarks.generation.shares import ratios, shares, weight_bytes
from benchmarks.generation.systems import ShapeSetting
from benchmarks.generation.systems.tandem_model import PackedTandem

from tandem.bench.model_shapes import ModelShape, find_shape
from tandem.bench.peers.turns import measure_rounds, median
from tandem.core.units import format_bytes, parse_bytes
from tandem.kernels.cpu import detect_cpu
from tandem.kernels.engine import choose_isa

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
_OVER, _OVER_LAYERS = "qwen3-30b-a3b", 4
_LAYERS = (4, 3, 2)
_MOST_HALVINGS = 2


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("architectures", nargs="*", metavar="NAME", help=", ".join(RELEASED))
    parser.add_argument("--write", action="store_true", help="write rows into docs/models.md")
    parser.add_argument(
        "--memory", type=parse_bytes, default="10GB", help="of weights, with Qwen3-MoE's"
    )
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=detect_cpu().num_threads)
    parser.add_argument("--expert-dtype", default="mxfp4")
    parser.add_argument("--dense-dtype", default="int8")
    options = parser.parse_args()
    for name in options.architectures:
        if name not in RELEASED:
            parser.error(f"{name} has no released shape; known: {', '.join(RELEASED)}")
    return options


def fitting(
    shape: ModelShape, num_bytes: int, setting: ShapeSetting
) -> tuple[ModelShape, int] | None:
    """Return a shape with as many layers, or experts, as fit in this memory, and its layers.

    None if not even two layers with a quarter of the experts fit.
    """
    for halvings in range(_MOST_HALVINGS + 1):
        part = with_experts(shape, num_experts(shape) >> halvings) if halvings else shape
        for layers in _LAYERS if halvings == 0 else _LAYERS[-1:]:
            if weight_bytes(setting, part, layers) <= num_bytes:
                return part, layers
    return None


def of_shape(shape: ModelShape, layers: int, setting: ShapeSetting) -> PackedTandem:
    """Load a shape into memory; runs in its own process."""
    sampled = shape.sample(layers)
    return PackedTandem(setting, sampled)


def measured(released: Released, options: argparse.Namespace) -> str:
    """Return a row's cells: which part of a shape was measured, and the results."""
    setting = ShapeSetting(
        shape=_OVER, layers=_OVER_LAYERS, vocabulary=options.vocabulary, threads=options.threads,
        prompt=options.prompt, steps=options.steps, expert_dtype=options.expert_dtype,
        dense_dtype=options.dense_dtype, kv_dtype="auto", gguf=Path(), has_flash_attention=False,
        isa=choose_isa(os.environ.get("TANDEM_ISA", "")),
    )  # fmt: skip
    whole, over = released.shape(), find_shape(_OVER)
    left = options.memory - weight_bytes(setting, over, _OVER_LAYERS)
    found = fitting(whole, left, setting)
    if found is None:
        return f"{released.name} | not tried: {format_bytes(left)} do not hold it | | | | |"
    shape, layers = found
    size = format_bytes(weight_bytes(setting, shape, layers))
    tried = f"{layers} of {whole.values['num_hidden_layers']} layers"
    if num_experts(shape) < num_experts(whole):
        tried += f", {num_experts(shape)} of {num_experts(whole)} experts"
    print(f"{released.name}: {tried}, {size}: {shape.sample(layers).kinds}", flush=True)
    makers = {
        released.name: partial(of_shape, shape, layers),
        _OVER: partial(of_shape, over, _OVER_LAYERS),
    }
    speeds = measure_rounds([makers], setting, [0], options.rounds)
    ours, theirs = speeds[released.name][0], speeds[_OVER][0]
    _, ratio = ratios(ours, theirs)
    middle = median(ours)
    print(json.dumps({"shape": released.name, "layers": layers, **asdict(middle), "over": ratio}))
    share = shares(middle)[1]
    return f"{released.name} | {tried} | {size} | {middle.decode:.1f} | {share:.2f} | {ratio:.2f}"


def rows_in(text: str) -> dict[str, str]:
    """Return the cells of the section's rows, by architecture."""
    section = re.search(r"^## Released shapes\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
    assert section is not None, f"{DOCUMENT} has no section of released shapes"
    rows = re.findall(r"^\| (?!architecture )(\w+) \| (.+) \|$", section[1], re.MULTILINE)
    return dict(rows)


def written(text: str, rows: dict[str, str]) -> str:
    """Return the document with other rows in its section."""
    table = "".join(f"| {name} | {rows[name]} |\n" for name in RELEASED if name in rows)
    return re.sub(
        r"(^## Released shapes\n.*?^\|---[|-]*\n)(?:\|[^\n]*\n)*",
        lambda match: match[1] + table,
        text,
        flags=re.MULTILINE | re.DOTALL,
    )


def main() -> None:
    """Measure, print, and write each row."""
    options = read_options()
    known = rows_in(DOCUMENT.read_text(encoding="utf-8"))
    names = options.architectures or [name for name in RELEASED if name not in known]
    for name in names:
        try:
            cells = measured(RELEASED[name], options)
        except Exception as error:  # of Transformers' code, too: one row less, and the others
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            continue
        print(f"| {name} | {cells} |", flush=True)
        if options.write:
            text = DOCUMENT.read_text(encoding="utf-8")
            DOCUMENT.write_text(written(text, rows_in(text) | {name: cells}), encoding="utf-8")


if __name__ == "__main__":
    main()

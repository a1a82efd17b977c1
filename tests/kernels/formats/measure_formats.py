"""Prints the table of docs/formats.md: each format's loss on real experts and packing speed.

python -m tests.kernels.formats.measure_formats DIRECTORY-OF-A-MIXTRAL-CHECKPOINT
"""

import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from tandem.kernels.formats import WeightFormat, pack, unpack
from tests.kernels.formats.sources import ROUNDED

EXPERTS = [(layer, expert) for layer in (0, 9, 19, 29) for expert in (0, 5)]
NUM_ROWS = 64
PREFIX, PARTS = "model.layers", ("w1", "w3", "w2")  # gate, up, down


def read_experts(directory: Path) -> list[list[Tensor]]:
    names = [
        [f"{PREFIX}.{layer}.block_sparse_moe.experts.{expert}.{part}.weight" for part in PARTS]
        for layer, expert in EXPERTS
    ]
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in set(tensors.keys()) & {name for expert in names for name in expert}:
                found[name] = tensors.get_tensor(name).float()
    return [[found[name] for name in expert] for expert in names]


def run(rows: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T


def losses(fmt: WeightFormat, experts: list[list[Tensor]], has_search: bool) -> tuple[float, ...]:
    """Return the relative errors of weights and outputs (norms), and packed weights per second."""
    sums = torch.zeros(4, dtype=torch.float64)
    seconds = 0.0
    for number, parts in enumerate(experts):
        start = time.process_time()
        packed = [pack(part, fmt, has_search=has_search) for part in parts]
        seconds += time.process_time() - start
        rounded = [unpack(part) for part in packed]
        rows = torch.randn(
            NUM_ROWS, parts[0].shape[1], generator=torch.Generator().manual_seed(number)
        )
        exact, actual = run(rows, *parts), run(rows, *rounded)
        for part, value in zip(parts, rounded, strict=True):
            sums[0] += (value - part).square().sum()
            sums[1] += part.square().sum()
        sums[2] += (actual - exact).square().sum()
        sums[3] += exact.square().sum()
    count = sum(part.numel() for parts in experts for part in parts)
    errors = (sums[0::2] / sums[1::2]).sqrt().tolist()
    return (*errors, count / seconds)


def main() -> None:
    torch.set_num_threads(1)
    experts = read_experts(Path(sys.argv[1]).expanduser())
    print(
        "| format | bits | weights | searched | output | searched | gain | M weights/s | searched |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for fmt in ROUNDED:
        plain, best = losses(fmt, experts, False), losses(fmt, experts, True)
        cells = [f"{100 * value:.3g} %" for value in (plain[0], best[0], plain[1], best[1])]
        gain = f"{100 * (1 - best[1] / plain[1]):.0f} %" if plain[1] else "-"
        speed = [f"{value[2] / 1e6:.0f}" for value in (plain, best)]
        print("|", " | ".join([fmt.name, f"{fmt.bits_per_weight:.4g}", *cells, gain, *speed]), "|")


if __name__ == "__main__":
    main()

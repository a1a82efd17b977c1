"""The cells of the comparison: a format, a share of experts on the GPU, a batch, a system."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.gpu.systems import BASELINES, TANDEM, System

MOST_CELLS = 24


class Cell(NamedTuple):
    """One measurement."""

    expert_dtype: str
    share: float  # of all experts that have a slot
    batch: int
    system: System


def cells(
    formats: Sequence[str], shares: Sequence[float], batches: Sequence[int], systems: Sequence[str]
) -> list[Cell]:
    """Return Tandem in every cell, and the others with half of the experts and batch 1.

    Cells of the same format and system are adjacent, because changing either costs seconds.
    """
    chosen: list[Cell] = []
    for expert_dtype in formats:
        if "tandem" in systems:
            # Every share at batch 1 first: a run that is cut short has the important ones.
            pairs = itertools.product(batches, shares)
            chosen += [Cell(expert_dtype, share, batch, TANDEM) for batch, share in pairs]
        if expert_dtype == formats[0]:
            others = (system for system in BASELINES if system.name in systems)
            chosen += [Cell(expert_dtype, 0.5, 1, system) for system in others]
    return chosen[:MOST_CELLS]

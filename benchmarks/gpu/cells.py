"""The cells of the comparison: a format, a share of the experts on the GPU, a batch, a system."""

from collections.abc import Iterator, Sequence
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
    """Return Tandem in every cell, and the others at half of the experts and batch 1.

    Cells of the same format and system follow each other: changing either costs seconds.
    """
    chosen = list(_cells(formats, shares, batches, systems))
    return chosen[:MOST_CELLS]


def _cells(
    formats: Sequence[str], shares: Sequence[float], batches: Sequence[int], systems: Sequence[str]
) -> Iterator[Cell]:
    for place, expert_dtype in enumerate(formats):
        if "tandem" in systems:
            # Every share at batch 1 first: a run that is cut short has the important ones.
            for batch in batches:
                for share in shares:
                    yield Cell(expert_dtype, share, batch, TANDEM)
        if place == 0:
            for system in BASELINES:
                if system.name in systems:
                    yield Cell(expert_dtype, 0.5, 1, system)

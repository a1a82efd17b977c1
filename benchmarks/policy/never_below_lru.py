"""Is the default eviction ever below LRU? `python -m benchmarks.policy.never_below_lru [NAME...]`

Hit rates of the default eviction and of LRU, cold, at equal slots, on real traces as they are and
rearranged, and on synthetic routing (`routings.py`), at batches 1 to 32 and with 6 to 90 % of the
experts resident: over a whole cell, and over its first 200 steps. Of the real traces six middle
layers are used. Then, as in docs/policies.md (all layers, odd sequences, batch 1, a quarter
resident): the share of the gap from LRU to Belady that is closed, whole and cut into short
sequences.

NAME selects traces by the beginning of their names. As many traces run at a time as there are
processors. The last line is one JSON object; the exit status is 1 if a cell is below LRU by more
than .001.
"""

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from benchmarks.policy.report import NAMES, ROOT, odd_sequences
from benchmarks.policy.routings import (
    LARGE_MODELS,
    SYNTHETIC_EXPERTS,
    cut,
    interleaved,
    layers_of,
    merged,
    permuted,
    synthetic,
    weakly_local,
)

from tandem.experts.cache.policy_tables import NATIVE_TABLES
from tandem.policy.eviction import EVICTIONS
from tandem.policy.eviction.next_use import NextUse
from tandem.policy.plan import Geometry, LayerLoad
from tandem.policy.settings import PlannerSettings
from tandem.sim.hit_rate import belady_hit_rate, demand_loads, hit_rate
from tandem.trace import RoutingTrace, read_trace

BATCHES = (1, 2, 4, 8, 16, 32)
SHARES = (0.06, 0.1, 0.25, 0.5, 0.75, 0.9)
LAYERS = 6  # of a real trace
TOKENS, STEPS = 4096, 512  # of a cell: the larger of this many tokens and this many steps
FIRST_STEPS = 200
WORST_ALLOWED = -0.001


class Cell(NamedTuple):
    """One comparison; hit rates."""

    trace: str
    batch: int
    share: float
    lru: float
    ours: float
    first_lru: float  # in the first 200 steps
    first_ours: float

    @property
    def gain(self) -> float:
        """Return the hit rate minus LRU's."""
        return self.ours - self.lru

    @property
    def first_gain(self) -> float:
        """Return the hit rate minus LRU's in the first steps."""
        return self.first_ours - self.first_lru


def real_traces() -> Iterator[tuple[str, RoutingTrace]]:
    """Yield the recorded traces and their variants, by name."""
    for name in NAMES:
        trace = read_trace(ROOT / "data" / "traces" / f"{name}.npz")
        first = (trace.meta.n_moe_layers - LAYERS) // 2
        part = layers_of(trace, first, first + LAYERS)
        yield f"{name}, whole", part
        yield f"{name}, cut", cut(part)
        yield f"{name}, two tasks", interleaved(part)
        yield f"{name}, permuted", permuted(part)
        yield f"{name}, merged and cut", cut(merged(trace))


def all_traces() -> Iterator[tuple[str, RoutingTrace]]:
    """Yield every trace by name."""
    yield from real_traces()
    for num_experts in SYNTHETIC_EXPERTS:
        for trace in synthetic(num_experts):
            yield trace.meta.model, trace
    for num_experts in LARGE_MODELS:
        for trace in weakly_local(num_experts):
            yield trace.meta.model, trace


def cells_of(trace: RoutingTrace, name: str) -> list[Cell]:
    """Return the comparisons on one trace."""
    geometry = trace.meta.geometry
    cells = []
    for batch in BATCHES:
        loads = list(demand_loads(trace, batch, max(TOKENS, STEPS * batch)))
        for share in SHARES:
            slots = round(share * geometry.num_layers * geometry.num_experts)
            sizes = PlannerSettings().whole_set_sizes(geometry, slots)
            rates = _hit_rates(loads, geometry, sizes)
            first = _hit_rates(loads[:FIRST_STEPS], geometry, sizes)
            cells.append(Cell(name, batch, share, *rates, *first))
    return cells


def _hit_rates(
    loads: list[list[LayerLoad]], geometry: Geometry, sizes: list[int]
) -> tuple[float, float]:
    """Return the hit rates of LRU and of the default eviction."""
    lru, own = EVICTIONS.factory("lru")(geometry), NextUse(geometry, tables=NATIVE_TABLES)
    return (
        hit_rate(iter(loads), geometry, sizes, lru),
        hit_rate(iter(loads), geometry, sizes, own),
    )


def gap_closed(trace: RoutingTrace) -> float:
    """Return the closed share of the gap from LRU to Belady, batch 1, 25 % resident."""
    geometry = trace.meta.geometry
    slots = round(0.25 * geometry.num_layers * geometry.num_experts)
    whole = PlannerSettings().whole_set_sizes(geometry, slots)
    loads = list(demand_loads(trace, 1, trace.num_tokens))
    lru = hit_rate(iter(loads), geometry, whole, EVICTIONS.factory("lru")(geometry))
    own_sizes = PlannerSettings().set_sizes(geometry, slots)
    own = NextUse(geometry, tables=NATIVE_TABLES)
    ours = hit_rate(iter(loads), geometry, own_sizes, own)
    return (ours - lru) / (belady_hit_rate(iter(loads), geometry, whole) - lru)


def row(cells: list[Cell]) -> str:
    """Return the line of one trace."""
    mean = sum(cell.gain for cell in cells) / len(cells)
    worst, first = min(cells, key=_gain), min(cells, key=_first_gain)
    where = f"{worst.batch}, {worst.share:.0%}"
    first_where = f"{first.batch}, {first.share:.0%}"
    return (
        f"{cells[0].trace:<34} {mean:+.4f} {worst.gain:+.4f} {where:<9}"
        f" {first.first_gain:+.4f} {first_where}"
    )


def main() -> int:
    """Print a row per trace and the gaps; the last line of output is one JSON object."""
    prefixes = tuple(sys.argv[1:]) or ("",)
    traces = ((name, trace) for name, trace in all_traces() if name.startswith(prefixes))
    names, kept = zip(*traces, strict=True)
    cells: list[Cell] = []
    print(
        f"{'hit rate minus LRU':<34} {'mean':<7} worst: batch, share  first 200 steps", flush=True
    )
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(cells_of, kept, names):
            cells += found
            print(row(found), flush=True)
    gaps = {}
    for name in (name for name in NAMES if name.startswith(prefixes)):
        trace = odd_sequences(read_trace(ROOT / "data" / "traces" / f"{name}.npz"))
        gaps[f"{name}, whole"], gaps[f"{name}, cut"] = gap_closed(trace), gap_closed(cut(trace))
    for name, gap in gaps.items():
        print(f"gap from LRU to Belady closed, batch 1, 25%: {name:<24} {gap:.3f}")
    below = [cell for cell in cells if min(cell.gain, cell.first_gain) < WORST_ALLOWED]
    print(f"{len(cells)} cells; {len(below)} below {WORST_ALLOWED}")
    worst = {
        "whole": min(cells, key=_gain)._asdict(),
        "first": min(cells, key=_first_gain)._asdict(),
    }
    summary = {"cells": len(cells), "below": len(below), "worst": worst, "gap_closed": gaps}
    print(json.dumps(summary))
    return 1 if below else 0


def _gain(cell: Cell) -> float:
    return cell.gain


def _first_gain(cell: Cell) -> float:
    return cell.first_gain


if __name__ == "__main__":
    sys.exit(main())

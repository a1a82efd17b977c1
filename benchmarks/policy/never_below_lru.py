"""Is the default eviction ever below LRU? `python -m benchmarks.policy.never_below_lru [NAME...]`

Hit rates of the default eviction and of LRU, cold, at equal slots, on real traces as they are and
rearranged, and on synthetic routing (`routings.py`), at batches 1 to 32 and with a tenth to three
quarters of the experts resident. Of the real traces six layers in the middle. Then, as in
docs/policies.md (all layers, odd sequences, batch 1, a quarter resident, two slots kept out as
ring): the share of the gap from LRU to Belady that is closed, whole and cut into short sequences.

NAME: only traces whose names begin so. The last line is one JSON object.
"""

import json
import sys
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.policy.report import NAMES, ROOT, odd_sequences
from benchmarks.policy.routings import (
    SYNTHETIC_EXPERTS,
    cut,
    interleaved,
    layers_of,
    merged,
    permuted,
    synthetic,
)

from tandem.experts.cache.policy_tables import NATIVE_TABLES
from tandem.policy.eviction import EVICTIONS
from tandem.policy.eviction.next_use import NextUse
from tandem.policy.settings import PlannerSettings
from tandem.sim.hit_rate import belady_hit_rate, demand_loads, hit_rate
from tandem.trace import RoutingTrace, read_trace

BATCHES = (1, 2, 4, 8, 16, 32)
SHARES = (0.1, 0.25, 0.5, 0.75)
LAYERS = 6  # of a real trace
TOKENS, STEPS = 4096, 512  # of a cell: the larger of so many tokens and so many steps
WORST_ALLOWED = -0.002


class Cell(NamedTuple):
    """One comparison."""

    trace: str
    batch: int
    share: float
    lru: float  # hit rate
    ours: float

    @property
    def gain(self) -> float:
        """Return the hit rate above LRU's."""
        return self.ours - self.lru


def real_traces() -> Iterator[tuple[str, RoutingTrace]]:
    """Yield the recorded traces, and what is made of them, by name."""
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


def cells_of(name: str, trace: RoutingTrace) -> Iterator[Cell]:
    """Yield the comparisons on one trace."""
    geometry = trace.meta.geometry
    for batch in BATCHES:
        loads = list(demand_loads(trace, batch, max(TOKENS, STEPS * batch)))
        for share in SHARES:
            slots = round(share * geometry.num_layers * geometry.num_experts)
            sizes = PlannerSettings().whole_set_sizes(geometry, slots)
            lru = hit_rate(iter(loads), geometry, sizes, EVICTIONS.factory("lru")(geometry))
            own = NextUse(geometry, tables=NATIVE_TABLES)
            yield Cell(name, batch, share, lru, hit_rate(iter(loads), geometry, sizes, own))


def gap_closed(trace: RoutingTrace) -> float:
    """Return the share of the gap from LRU to Belady that is closed, batch 1, 25 % resident."""
    geometry = trace.meta.geometry
    slots = round(0.25 * geometry.num_layers * geometry.num_experts)
    whole = PlannerSettings().whole_set_sizes(geometry, slots)
    loads = list(demand_loads(trace, 1, trace.num_tokens))
    lru = hit_rate(iter(loads), geometry, whole, EVICTIONS.factory("lru")(geometry))
    own_sizes = PlannerSettings().set_sizes(geometry, slots)
    own = NextUse(geometry, tables=NATIVE_TABLES)
    ours = hit_rate(iter(loads), geometry, own_sizes, own)
    return (ours - lru) / (belady_hit_rate(iter(loads), geometry, whole) - lru)


def main() -> None:
    """Print a row per trace and the gaps; the last line of output is one JSON object."""
    wanted = tuple(sys.argv[1:]) or ("",)
    cells: list[Cell] = []
    rows = []
    print(f"{'hit rate minus LRU':<36} {'mean':>7} {'worst':>7}  worst cell", flush=True)
    for name, trace in all_traces():
        if not name.startswith(wanted):
            continue
        found = list(cells_of(name, trace))
        cells += found
        mean, worst = sum(cell.gain for cell in found) / len(found), min(found, key=_gain)
        rows.append({"trace": name, "mean": round(mean, 4), "worst": round(worst.gain, 4)})
        where = f"batch {worst.batch}, {worst.share:.0%}"
        print(f"{name:<36} {mean:+.4f} {worst.gain:+.4f}  {where}", flush=True)
    gaps = {}
    for name in NAMES:
        if not name.startswith(wanted):
            continue
        trace = odd_sequences(read_trace(ROOT / "data" / "traces" / f"{name}.npz"))
        gaps[f"{name}, whole"], gaps[f"{name}, cut"] = gap_closed(trace), gap_closed(cut(trace))
    for name, gap in gaps.items():
        print(f"gap from LRU to Belady closed, batch 1, 25%: {name:<24} {gap:.3f}")
    below = sum(cell.gain < WORST_ALLOWED for cell in cells)
    worst = min(cells, key=_gain)
    print(f"{len(cells)} cells; {below} below {WORST_ALLOWED}")
    summary = {"cells": len(cells), "below": below, "worst": worst._asdict()}
    print(json.dumps({**summary, "traces": rows, "gap_closed": gaps}))


def _gain(cell: Cell) -> float:
    return cell.gain


if __name__ == "__main__":
    main()

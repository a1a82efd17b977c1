"""Slots in memory over a disk: is more memory ever slower, and what does the eviction gain?

    python -m benchmarks.policy.host_slots [--disk RATE] [--step GB] [--tokens N] [--json]

The real runs' native eviction, on the virtual clock of `tandem simulate --disk`, over three kinds
of routing: the shipped traces (odd sequences; constants were chosen on the even ones); the same
with the experts of four or two layers merged into one, which gives 128 experts and 8 per token; and
the typical routing of `tandem plan`.

Memory: 8 to 20 GB of `--expert-memory` in steps, for Qwen3-30B-A3B's shape in int4; speeds are of
its 48 layers, over a trace's first tokens. Shares: slots for 10 to 90 % of each layer's experts,
with all tokens of each trace one by one; the gap is that from LRU to Belady. The exit status is 1
if more memory is slower anywhere, if hits are more than .002 below LRU's in as many slots, or if
less than .35 of the gap is closed at 50 % of a shipped trace. As many traces run at a time as there
are processors.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from benchmarks.policy.report import NAMES, ROOT, odd_sequences
from benchmarks.policy.routings import merged

from tandem.core.units import parse_bandwidth
from tandem.experts.cache.host_slots import share_of
from tandem.experts.cache.policy_tables import host_slot_eviction
from tandem.hardware.profiles import load_profile
from tandem.policy.cost import ShapeCosts, whole_pages
from tandem.policy.plan import Geometry
from tandem.sim.disk import DiskConditions, disk_hit_rates, replay_over_disk
from tandem.sim.typical_routing import typical_routing
from tandem.trace import RoutingTrace, read_trace

SHAPE = "qwen3-30b-a3b"
EVICTION = "next-use"
LEAST_GB, MOST_GB = 8.0, 20.0
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
GAP_SHARE = 0.5
LEAST_GAP_CLOSED, WORST_ALLOWED = 0.35, -0.002
MERGED = {"deepseek-v2-lite": (4, 2), "gpt-oss-20b": (2, 4)}  # experts kept of a layer, layers
_TYPICAL = Geometry(num_layers=6, num_experts=128, top_k=8)
_SEQUENCE_TOKENS, _SEQUENCES = 320, 12


class Point(NamedTuple):
    """One trace with an amount of memory."""

    trace: str
    gigabytes: float
    share: float
    hit_rate: float
    lru_hit_rate: float
    tokens_per_second: float
    lru_tokens_per_second: float


class Cell(NamedTuple):
    """Hit rates of one trace with slots for a share of the experts."""

    trace: str
    share: float
    hit_rate: float
    lru_hit_rate: float
    belady_hit_rate: float

    @property
    def gain(self) -> float:
        """Return the hit rate minus LRU's."""
        return self.hit_rate - self.lru_hit_rate

    @property
    def gap_closed(self) -> float:
        """Return the share of the gap from LRU to Belady."""
        gap = self.belady_hit_rate - self.lru_hit_rate
        return self.gain / gap if gap else 1.0


def all_traces() -> Iterator[tuple[str, RoutingTrace]]:
    """Yield every trace by name."""
    for name in NAMES:
        trace = odd_sequences(read_trace(ROOT / "data" / "traces" / f"{name}.npz"))
        yield name, trace
        yield f"{name}, 128 experts", merged(trace, *MERGED[name])
    yield (
        "typical",
        typical_routing(_TYPICAL, num_sequences=_SEQUENCES, num_tokens=_SEQUENCE_TOKENS),
    )


def points_of(
    named: tuple[str, RoutingTrace],
    costs: ShapeCosts,
    rate: float,
    sizes: Sequence[float],
    num_tokens: int,
) -> list[Point]:
    """Return one trace's speeds by gigabytes, Tandem's and LRU's."""
    name, trace = named
    layers = costs.num_moe_layers
    slots, counts = [whole_pages(costs.expert_bytes)] * layers, [costs.num_experts] * layers
    found = []
    for gigabytes in sizes:
        share = share_of(int(gigabytes * 1e9), slots, counts, has_device=False)
        conditions = DiskConditions(
            costs=costs, bytes_per_second=rate, share=share, limit=num_tokens
        )
        ours, lru = (
            replay_over_disk(trace, conditions, host_slot_eviction(eviction))
            for eviction in (EVICTION, "lru")
        )
        scale = trace.meta.n_moe_layers / layers
        speeds = [scale * tally.decode_tokens / tally.decode_seconds for tally in (ours, lru)]
        found.append(Point(name, gigabytes, share, ours.hit_rate, lru.hit_rate, *speeds))
    return found


def cells_of(named: tuple[str, RoutingTrace], costs: ShapeCosts) -> list[Cell]:
    """Return one trace's hit rates at each share."""
    name, trace = named
    cells = []
    for share in SHARES:
        conditions = DiskConditions(costs=costs, bytes_per_second=1.0, share=share)
        rates = disk_hit_rates(trace, conditions, host_slot_eviction(EVICTION))
        cells.append(Cell(name, share, **rates))
    return cells


def slower_with_more(points: Sequence[Point]) -> list[Point]:
    """Return one trace's points that are slower than the point with less memory before them."""
    ordered = sorted(points, key=lambda point: point.gigabytes)
    return [b for a, b in pairwise(ordered) if b.tokens_per_second < a.tokens_per_second]


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hardware", default="desktop-12gb", help="whose times count")
    parser.add_argument("--disk", type=parse_bandwidth, default="2GB/s", metavar="RATE")
    parser.add_argument("--step", type=float, default=1.0, metavar="GB")
    parser.add_argument("--tokens", type=int, default=2000, help="with each memory")
    parser.add_argument("--json", action="store_true", help="last line: one JSON document")
    return parser.parse_args()


def main() -> int:
    """Print a row for each point and cell; return the exit status."""
    options = read_options()
    costs = load_profile(options.hardware).shape(SHAPE)
    count = round((MOST_GB - LEAST_GB) / options.step)
    sizes = [LEAST_GB + number * options.step for number in range(count + 1)]
    traces = list(all_traces())
    points: list[Point] = []
    cells: list[Cell] = []
    slower: list[Point] = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        print("| trace | GB | experts in memory | hits | LRU | tok/s | LRU |")
        print("|---|---|---|---|---|---|---|")
        work = partial(
            points_of, costs=costs, rate=options.disk, sizes=sizes, num_tokens=options.tokens
        )
        for found in pool.map(work, traces):
            points += found
            slower += slower_with_more(found)
            print("\n".join(map(_point_row, found)), flush=True)
        print("\n| trace | experts in memory | hits | LRU | Belady | gap closed |")
        print("|---|---|---|---|---|---|")
        for rates in pool.map(partial(cells_of, costs=costs), traces):
            cells += rates
            print("\n".join(map(_cell_row, rates)), flush=True)
    gaps = {c.trace: c.gap_closed for c in cells if c.share == GAP_SHARE}
    worst = min(cells, key=lambda cell: cell.gain)
    fewer = [p for p in points if p.hit_rate < p.lru_hit_rate]
    print(f"\n{len(points)} points: {len(slower)} slower than with less memory, {len(fewer)} with "
          f"more misses than LRU; worst of {len(cells)} cells: {worst.gain:+.4f} of LRU's hit rate "
          f"({worst.trace}, {worst.share:.0%})")  # fmt: skip
    if options.json:
        found_all = {"points": [p._asdict() for p in points], "cells": [c._asdict() for c in cells]}
        print(json.dumps({"gap_closed": gaps, **found_all}))
    is_good = not slower and worst.gain >= WORST_ALLOWED
    return 0 if is_good and min(gaps[name] for name in NAMES) >= LEAST_GAP_CLOSED else 1


def _point_row(point: Point) -> str:
    return (
        f"| {point.trace} | {point.gigabytes:g} | {point.share:.0%} | {point.hit_rate:.3f} | "
        f"{point.lru_hit_rate:.3f} | {point.tokens_per_second:.2f} | "
        f"{point.lru_tokens_per_second:.2f} |"
    )


def _cell_row(cell: Cell) -> str:
    return (
        f"| {cell.trace} | {cell.share:.0%} | {cell.hit_rate:.4f} | {cell.lru_hit_rate:.4f} | "
        f"{cell.belady_hit_rate:.4f} | {cell.gap_closed:.2f} |"
    )


if __name__ == "__main__":
    sys.exit(main())

"""DALI's and paper 2's tables and figures beside ours: `python -m benchmarks.papers [NAME...]`.

Replays the shipped traces on profiles of the papers' testbeds. Only plans are timed (`overheads`),
and only the demo model is loaded (`look-ahead`). NAME: only these tables. --json: the last line has
all cells. --write: also into docs/papers.md, whose text is written by hand.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.papers import collaborative, dali, predictions
from benchmarks.papers.replays import Replays
from benchmarks.papers.table import Table, placed

from tandem.trace import read_trace

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "papers.md"
NAMES = ("deepseek-v2-lite", "gpt-oss-20b")
TABLES: dict[str, Callable[[Replays], Table]] = {
    "reading": collaborative.reading,
    "reuse": collaborative.reuse,
    "hit-rates": collaborative.hit_rates,
    "indexes": collaborative.indexes,
    "threads": collaborative.threads,
    "collaborative-speedups": collaborative.speedups,
    "plans": dali.plans,
    "statistics": predictions.statistics,
    "look-ahead": predictions.look_ahead,
    "memory": predictions.memory,
    "overheads": dali.overheads,
    "windows": dali.windows,
    "ablations": dali.ablations,
    "speedups": dali.speedups,
}


def main(words: Sequence[str] | None = None) -> int:
    """Print the tables one after another."""
    parser = argparse.ArgumentParser(prog="benchmarks.papers", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TABLES))
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    flags = parser.parse_args(words)
    unknown = [name for name in flags.names if name not in TABLES]
    if unknown:
        parser.error(f"unknown table {unknown[0]!r}; expected one of {', '.join(TABLES)}")
    traces = {name: read_trace(ROOT / "data" / "traces" / f"{name}.npz") for name in NAMES}
    replays = Replays(traces)
    found: dict[str, Table] = {}
    for name in flags.names or TABLES:
        print(f"{name}:", file=sys.stderr, flush=True)
        found[name] = TABLES[name](replays)
        print(f"\n{name}\n\n{found[name].markdown()}", flush=True)
        if flags.write:
            text = PAGE.read_text(encoding="utf-8")
            PAGE.write_text(placed(text, name, found[name]), encoding="utf-8")
    if flags.json:
        print(json.dumps({name: table._asdict() for name, table in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Draws docs/pictures/quality.svg and prints docs/quality.md's table, from the stored results.

python -m benchmarks.quality.picture
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.quality.curve import RESULTS

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "quality.svg"
NUM_WEIGHTS = 15_479_808
WIDTH, HEIGHT, MARGIN = 760, 480, 52
COLOURS = {
    ("tandem, recipe", True): "#d62728",
    ("tandem, uniform", True): "#ff9f4a",
    ("tandem, uniform", False): "#c9b79c",
    ("llama.cpp", True): "#1f77b4",
    ("llama.cpp", False): "#9ecae1",
}
Row = dict[str, Any]


def main() -> None:
    """Draw, and print the table."""
    rows: list[Row] = json.loads(RESULTS.read_text(encoding="utf-8"))
    PICTURE.write_text(svg(rows), encoding="utf-8")
    print("\n".join(table(rows)))


def bits_of(row: Row) -> float:
    """Return the bits per weight of the whole model."""
    return 8 * float(row["bytes"]) / NUM_WEIGHTS


def table(rows: Iterable[Row]) -> list[str]:
    """Return a row for each system and name, by size."""
    lines = [
        "| system | formats | bits a weight | KL with importance | without |",
        "|---|---|---|---|---|",
    ]
    found: dict[tuple[str, str], dict[bool, Row]] = {}
    for row in rows:
        found.setdefault((row["system"], row["name"]), {})[row["importance"]] = row
    for (system, name), both in sorted(
        found.items(), key=lambda p: bits_of(next(iter(p[1].values())))
    ):
        sizes = sorted({f"{bits_of(row):.2f}" for row in both.values()})
        kl = [f"{both[w]['kl']:.5f}" if w in both else "" for w in (True, False)]
        lines.append(f"| {system} | {name} | {' / '.join(sizes)} | {kl[0]} | {kl[1]} |")
    return lines


def svg(rows: list[Row]) -> str:
    """Draw KL on a logarithmic scale over bits per weight, with a line through the recipes."""
    low = math.floor(math.log10(min(row["kl"] for row in rows)))
    high = math.ceil(math.log10(max(row["kl"] for row in rows)))
    least, most = 2.0, 9.0

    def at(bits: float, kl: float) -> tuple[float, float]:
        x = MARGIN + (bits - least) / (most - least) * (WIDTH - 2 * MARGIN)
        y = MARGIN / 2 + (high - math.log10(kl)) / (high - low) * (HEIGHT - 1.5 * MARGIN)
        return round(x, 1), round(y, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">bits a weight, of the whole '
        "model</text>",
        '<text x="8" y="14">KL, nats</text>',
    ]
    for power in range(low, high + 1):
        x, y = at(least, 10.0**power)
        parts.append(f'<line x1="{x}" y1="{y}" x2="{WIDTH - MARGIN}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4}" text-anchor="end">{10.0**power:g}</text>')
    for bits in range(int(least), int(most) + 1):
        x, y = at(bits, 10.0**low)
        parts.append(f'<text x="{x}" y="{y + 16}" text-anchor="middle">{bits}</text>')
    for place, ((system, weighed), colour) in enumerate(COLOURS.items()):
        own = [r for r in rows if (r["system"], r["importance"]) == (system, weighed)]
        points = [at(bits_of(r), r["kl"]) for r in sorted(own, key=bits_of)]
        if system == "tandem, recipe":
            path = " ".join(f"{x},{y}" for x, y in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>' for x, y in points]
        how = "with importance" if weighed else "without"
        y = MARGIN / 2 + 16 * place
        parts.append(f'<circle cx="{WIDTH - 210}" cy="{y}" r="3.5" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - 200}" y="{y + 4}">{system}, {how}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()

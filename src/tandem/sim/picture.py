"""Line charts as SVG text, written directly, so that no plotting library is needed."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

WIDTH, HEIGHT, MARGIN, LEGEND = 420, 300, 48, 130
COLOURS = ("#7f7f7f", "#bcbd22", "#17becf", "#9467bd", "#ff7f0e", "#1f77b4", "#8c564b", "#d62728")


class Chart(NamedTuple):
    """One chart: a line per name over labelled positions."""

    title: str
    x_label: str
    x_values: Sequence[str]
    lines: Mapping[str, Sequence[float | None]]  # None: no value there


def svg(charts: Sequence[Chart]) -> str:
    """Return an SVG of charts side by side with one legend; vertical axes start at 0."""
    width = len(charts) * WIDTH + LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
    ]
    for place, chart in enumerate(charts):
        parts += _chart(chart, place * WIDTH)
    names = list(dict.fromkeys(name for chart in charts for name in chart.lines))
    for row, name in enumerate(names):
        y = MARGIN + 18 * row
        x = len(charts) * WIDTH
        parts.append(f'<rect x="{x}" y="{y - 8}" width="12" height="8" fill="{_colour(row)}"/>')
        parts.append(f'<text x="{x + 18}" y="{y}">{_escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _chart(chart: Chart, left: int) -> list[str]:
    values = [v for line in chart.lines.values() for v in line if v is not None]
    top = max(values, default=1.0) or 1.0
    x0, y0 = left + MARGIN, HEIGHT - MARGIN
    across, up = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    steps = max(1, len(chart.x_values) - 1)
    parts = [
        f'<text x="{left + WIDTH / 2:.0f}" y="20" text-anchor="middle">'
        f"{_escape(chart.title)}</text>",
        f'<line x1="{x0}" y1="{y0}" x2="{x0 + across}" y2="{y0}" stroke="black"/>',
        f'<line x1="{x0}" y1="{y0}" x2="{x0}" y2="{y0 - up}" stroke="black"/>',
        f'<text x="{left + WIDTH / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">'
        f"{_escape(chart.x_label)}</text>",
    ]
    for tick in range(5):
        y = y0 - up * tick / 4
        label = f"{top * tick / 4:.3g}"
        parts.append(f'<text x="{x0 - 4}" y="{y + 4:.0f}" text-anchor="end">{label}</text>')
    for i, label in enumerate(chart.x_values):
        x = x0 + across * i / steps
        parts.append(f'<text x="{x:.0f}" y="{y0 + 14}" text-anchor="middle">{label}</text>')
    for row, line in enumerate(chart.lines.values()):
        points = " ".join(
            f"{x0 + across * i / steps:.1f},{y0 - up * value / top:.1f}"
            for i, value in enumerate(line)
            if value is not None
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{_colour(row)}" stroke-width="2"/>'
        )
    return parts


def _colour(row: int) -> str:
    return COLOURS[row % len(COLOURS)]


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

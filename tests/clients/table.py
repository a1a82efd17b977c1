"""The table of results in docs/clients.md: one line per client, replaced when it is tried again."""

from collections.abc import Iterable
from pathlib import Path

from tests.clients.environment import Report

_DOCUMENT = Path(__file__).parents[2] / "docs" / "clients.md"
_HEAD = "| client | version | what it does | result | note | commit |"
_RULE = "|---|---|---|---|---|---|"


def write_table(reports: Iterable[Report], commit: str) -> None:
    """Write the lines of these clients, tried at a commit; keep the other lines."""
    before, _, rest = _DOCUMENT.read_text(encoding="utf-8").partition(_HEAD + "\n")
    table, _, after = rest.partition("\n\n")
    old = table.splitlines()[1:]
    lines = {line.split("|")[1].strip(): line for line in old}
    for report in reports:
        lines[report.client] = _line(report, commit)
    rows = [lines[name] for name in sorted(lines)]
    text = before + "\n".join([_HEAD, _RULE, *rows]) + ("\n\n" + after if after else "\n")
    _DOCUMENT.write_text(text, encoding="utf-8")


def _line(report: Report, commit: str) -> str:
    cells = [
        report.client, report.version, report.tried, report.result, report.note or "-", commit,
    ]  # fmt: skip
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"

"""Writes the tables of docs/performance.md from docs/figures.jsonl, one JSON object per row.

    python -m benchmarks.report            # writes the tables
    python -m benchmarks.report --check    # exit status 1 if a table is out of date

A row changes, or is added, from the output of its benchmark or by hand:

    python -m benchmarks.policy.prompts | tee prompts.txt
    python -m benchmarks.report --what "prompt of 2,048" --from prompts.txt --machine simulated
    python -m benchmarks.report --what "measuring a machine" --figure "5.4 s" --machine "Zen 4"
    python -m benchmarks.report --what "a new row" --table Disk --figure "1.1 GB/s" --machine EPYC \
        --command "python -m benchmarks.disk"

A benchmark's last line is one JSON object. A row's `template` selects the values to show, in the
syntax of Python's str.format: `{worst:.2f}`, `{cells[0][ratio]:.1%}`. A table stands below the
heading with its name; its first two lines are not changed.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
FIGURES, DOCUMENT = DOCS / "figures.jsonl", DOCS / "performance.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A figure; a bold goal was missed; the date is the measurement's."""

    table: str
    what: str
    figure: str
    goal: str = ""
    machine: str
    date: str
    command: str
    template: str = ""

    @property
    def line(self) -> str:
        """Return the row's line in the table."""
        cells = (self.what, self.figure, self.goal, self.machine, self.date, f"`{self.command}`")
        return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)

    def filled(self, output: dict[str, Any]) -> str:
        """Return the figure from an output; raises ValueError if a part is missing."""
        if not self.template:
            raise ValueError(f"row {self.what!r} has no template; give --template or --figure")
        try:
            return self.template.format_map(output)
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"the output has no {error} of template {self.template!r}") from error


def read_rows(file: Path) -> list[Row]:
    """Return all rows, in the tables' order."""
    return [Row(**json.loads(line)) for line in file.read_text("utf-8").splitlines()]


def write_rows(rows: Sequence[Row], file: Path) -> None:
    """Write one row per line, without its empty fields."""
    objects = ({name: text for name, text in asdict(row).items() if text} for row in rows)
    lines = (json.dumps(one, ensure_ascii=False) + "\n" for one in objects)
    file.write_text("".join(lines), "utf-8")


def last_object(text: str) -> dict[str, Any]:
    """Return the last JSON object that is a line of its own; raises ValueError if there is none."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise ValueError("expected a benchmark's output, which ends with a JSON object in one line")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def with_tables(document: str, rows: Sequence[Row]) -> str:
    """Return the document with the rows in its tables; raises ValueError for a missing table."""
    for table in dict.fromkeys(row.table for row in rows):
        lines = "".join(f"{row.line}\n" for row in rows if row.table == table)
        escaped = lines.replace("\\", r"\\")
        head = rf"(^## {re.escape(table)}\n(?:(?!## ).*\n)*?\|.*\n\|[-|]+\n)(?:\|.*\n)*"
        document, found = re.subn(head, r"\1" + escaped, document, flags=re.MULTILINE)
        if found != 1:
            raise ValueError(f"docs/performance.md has no table under a heading {table!r}")
    return document


def changed(rows: Sequence[Row], beginning: str, values: dict[str, str], output: str) -> list[Row]:
    """Return the rows with one changed or added to its table; raises ValueError.

    `beginning` must match the start of exactly one row's `what`; `output` is a benchmark's, or
    empty.
    """
    fitting = [row for row in rows if row.what.startswith(beginning)]
    if "table" in values:
        fitting = [row for row in fitting if row.table == values["table"]]
    if len(fitting) > 1:
        raise ValueError(
            f"{len(fitting)} rows begin with {beginning!r}; say more of it, or --table"
        )
    new = {"what": beginning, "figure": ""} | (asdict(fitting[0]) if fitting else {}) | values
    missing = [field.name for field in fields(Row) if field.name not in {*new, "goal", "template"}]
    if missing:
        raise ValueError(
            f"no row begins with {beginning!r}; a new one needs --{', --'.join(missing)}"
        )
    row = Row(**new)
    if output:
        row = replace(row, figure=row.filled(last_object(output)))
    all_rows = [row if one in fitting else one for one in rows] + [row] * (not fitting)
    tables = list(dict.fromkeys(one.table for one in all_rows))
    return sorted(all_rows, key=lambda one: tables.index(one.table))


def main(words: Sequence[str] | None = None) -> int:
    """Change a row if one is named, and write or check the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; 1: it would change")
    parser.add_argument("--what", help="the row to change or add: how its first cell begins")
    parser.add_argument(
        "--from", dest="output", type=Path, help="its benchmark's output, in a file"
    )
    for field in fields(Row):
        if field.name != "what":
            parser.add_argument(f"--{field.name}")
    options = vars(parser.parse_args(words))
    check, beginning, output = (options.pop(name) for name in ("check", "what", "output"))
    values = {name: text for name, text in options.items() if text is not None}
    try:
        rows = read_rows(FIGURES)
        if beginning:
            if output or "figure" in values:
                values.setdefault("date", f"{datetime.now(UTC):%Y-%m-%d}")
            rows = changed(rows, beginning, values, output.read_text("utf-8") if output else "")
        document = with_tables(DOCUMENT.read_text("utf-8"), rows)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if check:
        return int(document != DOCUMENT.read_text("utf-8"))
    write_rows(rows, FIGURES)
    DOCUMENT.write_text(document, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

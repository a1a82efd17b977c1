"""Writes the table of docs/datapoints/README.md: each machine's forecast and measurement.

python -m benchmarks.datapoints
"""

from pathlib import Path

from tandem.forecast.report.datapoint import HEAD, read_rows

FOLDER = Path(__file__).parents[1] / "docs" / "datapoints"
BEGIN, END = "<!-- datapoints: begin -->\n", "<!-- datapoints: end -->\n"


def table(folder: Path = FOLDER) -> str:
    """Return the table of the datapoints in a directory, sorted by file name."""
    rows = [row.line for file in sorted(folder.glob("*.json")) for row in read_rows(file)]
    return "\n".join([*HEAD, *rows]) + "\n"


def main() -> None:
    """Write the table."""
    page = FOLDER / "README.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + table() + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()

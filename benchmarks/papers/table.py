"""A table of cells, and its place between two marks in a document."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

NONE = "-"


class Table(NamedTuple):
    """Rows of cells below a head; each row has as many cells as the head."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Return the table in Markdown."""
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def shown(value: float | None, form: str) -> str:
    """Return a formatted value, a dash for None."""
    return NONE if value is None else format(value, form)


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of known values; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def over(value: float | None, base: float | None) -> float | None:
    """Return the quotient; None if a part of it is unknown."""
    return None if value is None or not base else value / base


def marks(name: str) -> tuple[str, str]:
    """Return the lines around a table in a document."""
    return f"<!-- {name} -->", f"<!-- end of {name} -->"


def placed(text: str, name: str, table: Table) -> str:
    """Return a document with this table between its marks; `ValueError` if it has none."""
    first, last = marks(name)
    before, found, rest = text.partition(f"{first}\n")
    _, ended, after = rest.partition(last)
    if not found or not ended:
        raise ValueError(f"the document has no lines {first} and {last}; expected both")
    return f"{before}{first}\n{table.markdown()}\n{last}{after}"

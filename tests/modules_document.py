"""The table of modules in docs/architecture.md, from the first lines of their docstrings."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import REPOSITORY

PATH = REPOSITORY / "docs" / "architecture.md"
COMMAND = "make docs-modules"
_HEADING = "## Modules\n"
_SOURCES = REPOSITORY / "src"


def hand_written(text: str) -> str:
    """Return the document without the table."""
    return text.partition(_HEADING)[0]


def with_table(text: str) -> str:
    """Return the document with the table as the modules have it now."""
    table = "\n".join(_table(_SOURCES / "tandem"))
    return (
        f"{hand_written(text)}{_HEADING}\nWritten from the modules' docstrings by `{COMMAND}`; "
        f"a test fails while it is out of date.\n\n{table}\n"
    )


def first_line(file: Path) -> str:
    """Return the first line of a module's docstring; nothing if it has none."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def _table(package: Path) -> Iterator[str]:
    yield from ("| module | what it is |", "|---|---|")
    for name, file in sorted((_name(file), file) for file in package.rglob("*.py")):
        yield f"| `{name}` | {first_line(file).replace('|', chr(92) + '|')} |"


def _name(file: Path) -> str:
    parts = file.relative_to(_SOURCES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

"""Makes the table of modules in docs/modules.md from the first lines of docstrings."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import REPOSITORY

PATH = REPOSITORY / "docs" / "modules.md"
COMMAND = "make docs-modules"
_SOURCES = REPOSITORY / "src"


def document() -> str:
    """Return the document for the current modules."""
    table = "\n".join(_table(_SOURCES / "tandem"))
    return (
        "# Modules\n\nThe first part of the API reference: every module with the first line of its "
        f"docstring. `{COMMAND}` writes this page; a test fails while it is out of date.\n\n"
        f"{table}\n"
    )


def first_line(file: Path) -> str:
    """Return the first line of a module's docstring, or an empty string."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def _table(package: Path) -> Iterator[str]:
    yield from ("| module | what it is |", "|---|---|")
    for name, file in sorted((_name(file), file) for file in package.rglob("*.py")):
        yield f"| `{name}` | {first_line(file).replace('|', chr(92) + '|')} |"


def _name(file: Path) -> str:
    parts = file.relative_to(_SOURCES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

"""Tests that documents name existing things, and that generated documents are up to date.

Writes the table of modules, docs/modules.md: `pytest tests/test_documents.py --write-docs`.
"""

import importlib
import re

import pytest

from tests import modules_document
from tests.conftest import REPOSITORY

ARCHITECTURE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGE = REPOSITORY / "src" / "tandem"
DOCUMENTS = sorted(
    file.relative_to(REPOSITORY).as_posix()
    for folder in (".", "docs", "docs/decisions", "docs/history")
    for file in (REPOSITORY / folder).glob("*.md")
)
# In a page of history an entry, once written, stays one line.
LONG_LINED = "docs/history/2"
SHORT_LINED = [document for document in DOCUMENTS if not re.match(LONG_LINED, document)]
MENTIONED = set(re.findall(r"`(tandem(?:\.\w+)+)`", ARCHITECTURE))


@pytest.mark.parametrize("name", sorted(MENTIONED))
def test_modules_in_architecture_exist(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        home, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(home), attribute), name


def test_table_of_modules_is_up_to_date(request: pytest.FixtureRequest) -> None:
    text = modules_document.document()
    if request.config.getoption("--write-docs"):
        modules_document.PATH.write_text(text, encoding="utf-8")
    else:
        assert text == modules_document.PATH.read_text(encoding="utf-8"), (
            f"run `{modules_document.COMMAND}`"
        )


def test_architecture_has_no_generated_table() -> None:
    assert len(ARCHITECTURE.splitlines()) < 100
    assert "| `tandem" not in ARCHITECTURE


def test_every_module_says_what_it_is() -> None:
    silent = [file for file in PACKAGE.rglob("*.py") if not modules_document.first_line(file)]
    assert silent == []


def test_paths_in_contributing_exist() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:src|csrc|tests|docs|examples)/[\w./-]+)`", text))
    assert len(paths) > 20
    assert {path for path in paths if not (REPOSITORY / path).exists()} == set()


@pytest.mark.parametrize("document", SHORT_LINED)
def test_lines_of_documents_are_short(document: str) -> None:
    lines = (REPOSITORY / document).read_text(encoding="utf-8").splitlines()
    long = [number for number, line in enumerate(lines, 1) if len(line) >= 300]
    assert [number for number in long if not lines[number - 1].startswith("|")] == []


def test_make_targets_in_documents_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    named = ("README.md", "CONTRIBUTING.md", "docs/architecture.md")
    texts = "".join((REPOSITORY / name).read_text(encoding="utf-8") for name in named)
    targets = set(re.findall(r"`make ([a-z-]+)|^    make ([a-z-]+)", texts, re.MULTILINE))
    names = {first or second for first, second in targets}
    assert names >= {"run", "test"}
    assert {name for name in names if f"\n{name}:" not in makefile} == set()

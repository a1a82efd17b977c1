"""Tests that words unknown to readers of this field stay out: see docs/glossary.md."""

import re

import pytest

from tests.conftest import REPOSITORY

# Words without a legitimate other use here, in lower case.
UNKNOWN = re.compile(
    r"\b(whoever|somebody|anew|rehears\w*|foresees|foreseeing|foresaw|foreseen)\b"
    r"|\bin (any )?company\b|\blone layers?\b|\ba (device|gpu) that is none\b|\bneed nothing\b"
    r"|\bit was not wanted\b|\bdecode process\b"
    # Names that are gone.
    r"|\blone[a-z]\w*|(?<![a-z])lone_\w+|\b_questions\b|\b(class|struct) places\b"
    r"|\bidle rows?\b|\baskew\b|\bknobody\b"
    r"|\b(copies|copied|asked) ahead\b"
    r"|graph_rows|\b(predicting|asking|fetching)_rows|\bsteps? of ([a-z\d]+ )?rows"
    # Former names of `--prediction regression` and `--eviction next-use` stand in quotes, where
    # they are still accepted.
    r"|(?<![`\"'])(foresight|successor)",
)
HISTORY = "docs/history/"  # as it was written
FOLDERS = {
    "src/tandem": "*.py",
    "src/tandem/server/page": "*",
    "csrc": "*.[chi][pn]*",  # .cpp, .hpp and .inl
    "docs": "*.md",
    "benchmarks": "*.py",
    "tests": "*.py",
}
FILES = sorted(
    file.relative_to(REPOSITORY).as_posix()
    for folder, pattern in FOLDERS.items()
    for file in (REPOSITORY / folder).rglob(pattern)
    if file.is_file() and file.name != "test_words.py"
)


FIRST = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "Makefile")


@pytest.mark.parametrize("document", FIRST)
def test_first_documents_use_known_words(document: str) -> None:
    assert _found(document) == []


def test_code_and_documents_use_known_words() -> None:
    assert len(FILES) > 1000
    found = {file: _found(file) for file in FILES if not file.startswith(HISTORY)}
    assert {file: words for file, words in found.items() if words} == {}


def _found(file: str) -> list[str]:
    text = (REPOSITORY / file).read_text(encoding="utf-8").lower()
    return [match[0] for match in UNKNOWN.finditer(text)]

"""Words that readers of this field do not know stay out: docs/glossary.md has the field's own."""

import re

import pytest

from tests.conftest import REPOSITORY

# Words without a legitimate other use here. Names that users type (`foresight`) stay.
UNKNOWN = re.compile(
    r"\b(whoever|somebody|anew|rehears\w*|foresees|foreseeing|foresaw|foreseen)\b"
    r"|\bin (any )?company\b|\blone layers?\b|\ba device that is none\b|\bNeed nothing\b"
    r"|\bit was not wanted\b|\bdecode process\b",
    re.IGNORECASE,
)
HISTORY = "docs/history/"  # as it was written
FOLDERS = {
    "src/tandem": "*.py",
    "src/tandem/server/page": "*",
    "docs": "*.md",
    "benchmarks": "*.py",
}
FILES = sorted(
    file.relative_to(REPOSITORY).as_posix()
    for folder, pattern in FOLDERS.items()
    for file in (REPOSITORY / folder).rglob(pattern)
    if file.is_file()
)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_first_documents_use_known_words(document: str) -> None:
    assert _found(document) == []


def test_code_and_documents_use_known_words() -> None:
    assert len(FILES) > 300
    found = {file: _found(file) for file in FILES if not file.startswith(HISTORY)}
    assert {file: words for file, words in found.items() if words} == {}


def _found(file: str) -> list[str]:
    text = (REPOSITORY / file).read_text(encoding="utf-8")
    return [match[0] for match in UNKNOWN.finditer(text)]

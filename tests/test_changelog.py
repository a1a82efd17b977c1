"""Tests of CHANGELOG.md: the form of Keep a Changelog."""

import re
import tomllib

import pytest

from tests.conftest import REPOSITORY

TEXT = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+) - (\d{4}-\d\d-\d\d)")
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
# Heading -> the lines below it.
SECTIONS = {
    part.partition("\n")[0]: part.partition("\n")[2] for part in re.split(r"(?m)^## ", TEXT)[1:]
}


def test_versions_follow_the_unreleased_section_newest_first() -> None:
    first, *released = SECTIONS
    assert first == "Unreleased"
    found = [VERSION.fullmatch(heading) for heading in released]
    assert None not in found
    versions = [tuple(map(int, match.groups()[:3])) for match in found if match]
    dates = [match[4] for match in found if match]
    assert versions == sorted(versions, reverse=True)
    assert dates == sorted(dates, reverse=True)


def test_the_newest_version_is_the_package_s() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    assert [*SECTIONS][1].startswith(f"{project['version']} - ")


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_has_each_kind_of_change_once_and_in_order(section: str) -> None:
    kinds = re.findall(r"(?m)^### (.*)$", SECTIONS[section])
    assert kinds == [kind for kind in KINDS if kind in kinds]


@pytest.mark.parametrize("section", SECTIONS)
def test_entries_are_short_whole_sentences(section: str) -> None:
    _, _, entries = SECTIONS[section].partition("\n### ")
    lines = [line for line in entries.splitlines()[1:] if line and not line.startswith("### ")]
    wrong = [line for line in lines if not re.fullmatch(r"- .{,297}[.)]|[A-Z][^.]{,60}:", line)]
    assert wrong == []


def test_no_entry_stands_twice() -> None:
    entries = re.findall(r"(?m)^- .*$", TEXT)
    assert len(entries) == len({*entries})

"""Tests of the disk fault benchmark: what counts as a failure, and how it limits memory."""

from pathlib import Path
from typing import Any

from benchmarks.disk.faults import failures, table
from benchmarks.disk.memory_group import MemoryGroup


def line(outcome: str, *, may_fail: bool, fault: str = "reads short") -> dict[str, Any]:
    return {"fault": fault, "may_fail": may_fail, "outcome": outcome, "said": "why", "resident": 1}


def test_what_must_not_be_is_named() -> None:
    good = [line("sentence", may_fail=True), line("right", may_fail=True)]
    assert failures(good, "", 0) == []
    assert failures(good, "hung: no answer", 0) == ["hung: no answer"]
    assert failures(good, "", 2) == ["the system killed 2 processes for memory"]
    assert failures([line("right", may_fail=True)], "", 0) == [
        "no request has heard of: reads short"
    ]
    for outcome in ("wrong", "other error", "no sentence"):
        assert failures([*good, line(outcome, may_fail=True)], "", 0)
    assert failures([*good, line("sentence", may_fail=False, fault="none")], "", 0)
    assert table(good)[-1] == "| reads short | 2 | 1 | 1 | why |"


def group_of(directory: Path, *, is_version_1: bool) -> MemoryGroup:
    group = object.__new__(MemoryGroup)
    group.directory = directory
    group._is_version_1 = is_version_1
    return group


def test_memory_is_made_short_by_the_file_that_kills_nobody_first(tmp_path: Path) -> None:
    group = group_of(tmp_path, is_version_1=False)
    group.lower(100, 1000, 0.3, steps=5)
    assert (tmp_path / "memory.high").read_text() == "100"
    assert not (tmp_path / "memory.max").exists()
    group.lower(100, 1000, 1.0, steps=5)
    assert (tmp_path / "memory.max").read_text() == "100"
    group.raise_to(1000)
    assert (tmp_path / "memory.high").read_text() == "max"
    assert (tmp_path / "memory.max").read_text() == "1000"


def test_version_1_is_lowered_in_steps(tmp_path: Path) -> None:
    group = group_of(tmp_path, is_version_1=True)
    limits = []
    for progress in (0.0, 0.25, 0.5, 1.0):
        group.lower(100, 1100, progress, steps=5)
        limits.append(int((tmp_path / "memory.limit_in_bytes").read_text()))
    assert limits == [1100, 900, 700, 100]

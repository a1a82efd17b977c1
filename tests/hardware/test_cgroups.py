"""Tests of memory limits in control groups, of both versions and at any depth."""

from pathlib import Path

import pytest

from tandem.hardware.cgroups import memory_left
from tests.hardware.test_topology import write

STAT = "anon 4000\ninactive_file 700\nactive_file 50\nfile 900\n"


def write_group(directory: Path, limit: str, used: int = 5000) -> None:
    write(directory / "memory.max", limit)
    write(directory / "memory.current", str(used))
    write(directory / "memory.stat", STAT)


def test_pages_of_files_do_not_count_as_taken(tmp_path: Path) -> None:
    write_group(tmp_path / "sys/fs/cgroup", "9000")
    assert memory_left(tmp_path) == 9000 - (5000 - 750)


def test_the_lowest_of_a_group_and_those_above_it(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/user.slice/app.scope")
    write_group(tmp_path / "sys/fs/cgroup/user.slice", "6000")
    write_group(tmp_path / "sys/fs/cgroup/user.slice/app.scope", "8000", used=900)
    assert memory_left(tmp_path) == 6000 - (5000 - 750)


def test_the_limit_that_slows_down_counts_like_the_one_that_kills(tmp_path: Path) -> None:
    write_group(tmp_path / "sys/fs/cgroup", "9000")
    write(tmp_path / "sys/fs/cgroup/memory.high", "7000")
    assert memory_left(tmp_path) == 7000 - (5000 - 750)
    write(tmp_path / "sys/fs/cgroup/memory.high", "max")
    assert memory_left(tmp_path) == 9000 - (5000 - 750)


def test_version_1(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "4:memory:/docker/1\n5:cpu,cpuacct:/docker/1")
    top = tmp_path / "sys/fs/cgroup/memory"
    write(top / "memory.limit_in_bytes", "9000")
    write(top / "memory.usage_in_bytes", "5000")
    write(top / "memory.stat", "inactive_file 1\ntotal_inactive_file 600\ntotal_active_file 50\n")
    assert memory_left(tmp_path) == 9000 - (5000 - 650)


@pytest.mark.parametrize(("limit", "left"), [("max", None), ("", None), ("3000", 0)])
def test_no_limit_and_a_limit_that_is_passed(tmp_path: Path, limit: str, left: int | None) -> None:
    write_group(tmp_path / "sys/fs/cgroup", limit)
    assert memory_left(tmp_path) == left
    assert memory_left(tmp_path / "nowhere") is None

"""Reads how much processor time and memory Linux's control groups allow this process."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_CGROUPS = Path("sys/fs/cgroup")
# Files of version 2 and version 1: limits, usage, and the part of the usage that is page cache.
# Beyond memory.high processes are slowed down, beyond memory.max they are killed.
_MEMORY_FILES = (
    (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")),
    (
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


class _Group(NamedTuple):
    directory: Path
    is_version_1: bool


def processor_quota(root: Path) -> float | None:
    """Return how many processors the process may use at once; None: no limit."""
    found = (
        _quota_of_version_1(group.directory) if group.is_version_1 else _quota(group.directory)
        for group in _groups(root, "cpu")
    )
    return min((quota for quota in found if quota is not None), default=None)


def memory_left(root: Path) -> int | None:
    """Return the bytes that the process may still allocate; None: no limit.

    Pages of files count as free, as in the system's MemAvailable, so a model's file that was read
    earlier does not reduce the result.
    """
    found = (_memory_left(group) for group in _groups(root, "memory"))
    return min((left for left in found if left is not None), default=None)


def _groups(root: Path, controller: str) -> Iterator[_Group]:
    """Yield the groups that limit the process through `controller`: its own and all parents."""
    groups = read_text(root / "proc/self/cgroup") or ""
    for line in groups.splitlines() or ["0::/"]:
        _, _, rest = line.partition(":")
        kinds, _, name = rest.partition(":")
        if kinds and controller not in kinds.split(","):
            continue
        top = root / _CGROUPS / (controller if kinds else "")
        # In a container, the group's name may be the one outside of it.
        group = top / name.lstrip("/")
        for place in {top, *(p for p in (group, *group.parents) if p.is_relative_to(top))}:
            yield _Group(place, bool(kinds))


def _quota(group: Path) -> float | None:
    parts = (read_text(group / "cpu.max") or "").split()
    return _share(parts[0], parts[1]) if len(parts) == 2 else None


def _quota_of_version_1(group: Path) -> float | None:
    quota, period = read_text(group / "cpu.cfs_quota_us"), read_text(group / "cpu.cfs_period_us")
    return _share(quota, period) if quota and period else None


def _share(quota: str, period: str) -> float | None:
    try:
        share = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max"
        return None
    return share if share > 0 else None


def _memory_left(group: _Group) -> int | None:
    limit_files, used_file, cache_fields = _MEMORY_FILES[group.is_version_1]
    limits = (read_number(group.directory / name) for name in limit_files)
    limit = min((found for found in limits if found is not None), default=None)  # "max" gives None
    used = read_number(group.directory / used_file)
    if limit is None or used is None:
        return None
    lines = (
        line.split() for line in (read_text(group.directory / "memory.stat") or "").splitlines()
    )
    cache = sum(int(line[1]) for line in lines if len(line) == 2 and line[0] in cache_fields)
    return max(0, limit - max(0, used - cache))


def read_number(path: Path) -> int | None:
    """Return the number in a file; None if there is no file, or no number in it."""
    text = read_text(path)
    return int(text) if text is not None and text.isdecimal() else None


def read_text(path: Path) -> str | None:
    """Return a file's stripped text; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None

"""A control group with a memory limit, of version 1 or 2, for processes that start in it.

Needs root. Page cache counts, because the system charges it to the first reader; swap is not
allowed.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_TRIES = 50


class MemoryGroup:
    """A control group; created here, and removed by `remove`."""

    def __init__(self, limit_bytes: int, root: Path = ROOT) -> None:
        """Create the group; raises `OSError` if this process is not allowed to."""
        self._is_version_1 = (root / "memory").is_dir()
        own = _own_name(self._is_version_1)
        top = root / "memory" if self._is_version_1 else root
        parent = top / own if (top / own).is_dir() else top
        if not self._is_version_1:
            # Processes lie in leaves alone, so the new group is made at the top.
            parent = root
            (root / "cgroup.subtree_control").write_text("+memory")
        self.directory = parent / f"tandem-disk-{os.getpid()}-{time.monotonic_ns()}"
        self.directory.mkdir()
        try:
            self._limit(limit_bytes)
        except OSError:
            self.remove()
            raise

    def _limit(self, limit_bytes: int) -> None:
        if self._is_version_1:
            self._write("memory.limit_in_bytes", limit_bytes)
            self._write("memory.swappiness", 0)
        else:
            self._write("memory.max", limit_bytes)
            if (self.directory / "memory.swap.max").exists():
                self._write("memory.swap.max", 0)

    def _write(self, name: str, value: int) -> None:
        (self.directory / name).write_text(str(value))

    def enter(self) -> None:
        """Move the calling process, and all that it starts, into the group."""
        (self.directory / "cgroup.procs").write_text(str(os.getpid()))

    def used_bytes(self) -> int:
        """Return the memory of its processes, with their page cache."""
        name = "memory.usage_in_bytes" if self._is_version_1 else "memory.current"
        return int((self.directory / name).read_text())

    def lower(self, limit_bytes: int, from_bytes: int, progress: float, *, steps: int) -> None:
        """Reduce memory: first by `memory.high`, whose reclaim kills no process, then by the limit.

        `progress` goes from 0 to 1. Version 1 has no such file, so its limit is reduced in steps.
        Memory that cannot be reclaimed yet stays.
        """
        with contextlib.suppress(OSError):
            if self._is_version_1:
                done = int(progress * steps) / steps
                self._limit(int(from_bytes - done * (from_bytes - limit_bytes)))
            elif progress < 1.0:
                self._write("memory.high", limit_bytes)
            else:
                self._limit(limit_bytes)

    def raise_to(self, limit_bytes: int) -> None:
        """Raise the limits again."""
        self._limit(limit_bytes)
        if not self._is_version_1:
            (self.directory / "memory.high").write_text("max")

    def kills(self) -> int:
        """Return how many of its processes the system has killed for memory."""
        name = "memory.oom_control" if self._is_version_1 else "memory.events"
        for line in (self.directory / name).read_text().splitlines():
            key, _, number = line.partition(" ")
            if key == "oom_kill":
                return int(number)
        return 0

    def remove(self) -> None:
        """Remove the group after its processes have ended, with the pages charged to it."""
        for _ in range(_TRIES):
            try:
                return self.directory.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.1)
        self.directory.rmdir()


@contextmanager
def limited(limit_bytes: int | None) -> Iterator[MemoryGroup | None]:
    """Create a group for the context; None: no limit, and no group."""
    group = None if limit_bytes is None else MemoryGroup(limit_bytes)
    try:
        yield group
    finally:
        if group is not None:
            group.remove()


def _own_name(is_version_1: bool) -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, name = line.split(":", 2)
        if ("memory" in kinds.split(",")) if is_version_1 else not kinds:
            return name.lstrip("/")
    return ""


def drop_from_page_cache(folder: Path) -> None:
    """Drop a directory's files from the page cache: cached pages would not be charged again."""
    for file in filter(Path.is_file, folder.rglob("*")) if folder.is_dir() else [folder]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)

"""The disk's own speed: unbuffered reads of an expert's size, and the bytes read."""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tandem.experts.cache.host_slots import page_aligned

PAGE = 4096
DEPTHS = 1, 4, 16
RESTED = 0  # as a depth: one read after a rest, as a decode step's layer has it
_SECTOR = 512
# A probe reads about what a decode step does, so that a disk with a budget gives it the same rate.
_PROBE_READS, _RESTED_READS = 24, 8
_REST_SECONDS = 0.001


class DiskProbe:
    """Reads experts at random places of some files, without the page cache."""

    def __init__(self, files: list[Path], expert_bytes: int) -> None:
        """Open the files; raises `OSError` if unbuffered reads are refused."""
        self._size = -(-expert_bytes // PAGE) * PAGE
        self._files = [
            (os.open(file, os.O_RDONLY | os.O_DIRECT), file.stat().st_size) for file in files
        ]
        # On huge pages, as slots are: from pages of 4 KB a virtual disk gives half its rate.
        memory = page_aligned(max(DEPTHS), self._size).fill_(1)
        self._memory = [memoryview(one.numpy()) for one in memory]
        self._threads = ThreadPoolExecutor(max(DEPTHS))
        self._random = random.Random(os.getpid())
        self.rates: dict[int, list[float]] = {depth: [] for depth in (*DEPTHS, RESTED)}
        """Bytes per second of each probe, by depth."""

    def measure(self) -> None:
        """Probe the next depth."""
        depth = [*self.rates][sum(map(len, self.rates.values())) % len(self.rates)]
        if depth == RESTED:
            self._measure_rested()
            return
        places = [self._place() for _ in range(_PROBE_READS if depth > 1 else _RESTED_READS)]
        begin = time.perf_counter()
        parts = [(self._memory[i], places[i::depth]) for i in range(depth)]
        list(self._threads.map(_read_all, parts))
        seconds = time.perf_counter() - begin
        self.rates[depth].append(len(places) * self._size / seconds)

    def _measure_rested(self) -> None:
        seconds = 0.0
        for _ in range(_RESTED_READS):
            time.sleep(_REST_SECONDS)
            begin = time.perf_counter()
            _read_all((self._memory[0], [self._place()]))
            seconds += time.perf_counter() - begin
        self.rates[RESTED].append(_RESTED_READS * self._size / seconds)

    def _place(self) -> tuple[int, int]:
        descriptor, size = self._random.choice(self._files)
        return descriptor, self._random.randrange((size - self._size) // PAGE) * PAGE


def _read_all(part: tuple[memoryview, list[tuple[int, int]]]) -> None:
    memory, places = part
    for descriptor, first in places:
        if os.preadv(descriptor, [memory], first) != len(memory):
            raise OSError("a probe of the disk read less than it asked for")


class DeviceBytes:
    """The bytes that a file's disk has read since the machine started."""

    def __init__(self, file: Path) -> None:
        """Find the disk in /proc/diskstats; raises `OSError` if it is not there."""
        number = file.stat().st_dev
        self._name = f"{os.major(number)} {os.minor(number)}"
        self.read()

    def read(self) -> int:
        """Return the present number of bytes."""
        for line in Path("/proc/diskstats").read_text().splitlines():
            words = line.split()
            if " ".join(words[:2]) == self._name:
                return int(words[5]) * _SECTOR
        raise OSError(f"/proc/diskstats has no disk {self._name}")

"""Measures how fast a disk reads experts: pieces at random places of files, several at once.

Pieces bypass the system's page cache (O_DIRECT), which has the speed of memory. They are read into
huge pages, as slots consist of huge pages; into pages of 4 KB, a virtual disk reads at half the
rate. Where a file system refuses or ignores O_DIRECT, each piece is first dropped from the page
cache. This has no effect while a process has the file mapped.
"""

import contextlib
import ctypes
import mmap
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from tandem.hardware.page_cache import how_reads_go
from tandem.policy.cost import DiskCosts

DEPTHS = (1, 4, 16)  # reads at once
_PAGE_BYTES = 4096  # O_DIRECT reads whole pages, into memory that begins with a page
_MOST_PIECE_BYTES = 1 << 20  # larger reads are split: they would not be faster, only wait longer
_HUGE_PAGE_BYTES = 2 << 20
_SECONDS = 0.4  # per depth


class _File(NamedTuple):
    descriptor: int
    num_bytes: int


def measure_disk(
    files: Sequence[Path],
    expert_bytes: int,
    *,
    seconds: float = _SECONDS,
    depths: tuple[int, ...] = DEPTHS,
) -> DiskCosts | None:
    """Return the rates of random reads of experts from `files`, measured for `seconds` per depth.

    Returns None if no file has at least a page. Raises `OSError` if a file cannot be read.
    """
    sizes = {file: file.stat().st_size // _PAGE_BYTES * _PAGE_BYTES for file in files}
    piece = min(-(-expert_bytes // _PAGE_BYTES) * _PAGE_BYTES, _MOST_PIECE_BYTES)
    piece = min(piece, max(sizes.values(), default=0))
    if piece == 0:
        return None
    large = [file for file, size in sizes.items() if size >= piece]
    is_direct = how_reads_go(large[0]) == "direct"
    with ExitStack() as stack:
        opened = []
        for file in large:
            descriptor = os.open(file, os.O_RDONLY | (os.O_DIRECT if is_direct else 0))
            stack.callback(os.close, descriptor)
            opened.append(_File(descriptor, sizes[file]))
        read = _reader(opened, piece, is_direct=is_direct)
        rates = tuple(piece * _reads_per_second(read, depth, seconds, piece) for depth in depths)
    return DiskCosts(
        reads="direct" if is_direct else "buffered",
        piece_bytes=piece,
        depths=depths,
        bytes_per_second=rates,
    )


Read = Callable[[random.Random, memoryview], None]


def _reader(files: Sequence[_File], piece: int, *, is_direct: bool) -> Read:
    """Return a function that reads a piece at a random place of a random file into a buffer."""
    weights = [file.num_bytes for file in files]

    def read(source: random.Random, buffer: memoryview) -> None:
        (file,) = source.choices(files, weights)
        place = source.randrange((file.num_bytes - piece) // _PAGE_BYTES + 1) * _PAGE_BYTES
        if not is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.descriptor, place, piece, os.POSIX_FADV_DONTNEED)
        os.preadv(file.descriptor, [buffer], place)

    return read


def _reads_per_second(read: Read, depth: int, seconds: float, piece: int) -> float:
    """Return the reads per second of `depth` threads together, measured for `seconds`."""

    def keep_reading(seed: int) -> int:
        source, buffer, count = random.Random(seed), buffers[seed], 0
        while count == 0 or time.perf_counter() < end:
            read(source, buffer)
            count += 1
        return count

    buffers = [_huge_pages(piece) for _ in range(depth)]
    with ThreadPoolExecutor(depth, thread_name_prefix="tandem-disk") as pool:
        begin = time.perf_counter()
        end = begin + seconds
        total = sum(pool.map(keep_reading, range(depth)))
        return total / (time.perf_counter() - begin)


def _huge_pages(num_bytes: int) -> memoryview:
    """Return `num_bytes` of zeroed memory, inside one huge page if the system supports them."""
    memory = mmap.mmap(-1, 2 * _HUGE_PAGE_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    first = -address % _HUGE_PAGE_BYTES
    memory[first : first + num_bytes] = bytes(num_bytes)
    return memoryview(memory)[first : first + num_bytes]

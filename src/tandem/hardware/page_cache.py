"""Finds out whether O_DIRECT reads really bypass the system's page cache.

A file system may refuse such reads, or accept but buffer them. The test is residency: pages are
dropped from the cache, read, and looked up in the cache (mincore). The system reveals residency
only for files that this process may write; it reports other files, and pages that another process
holds, as resident. Unknown cases count as direct.
"""

import ctypes
import mmap
import os
from pathlib import Path
from typing import Literal

_PIECE_BYTES = 64 << 10
_PLACES = 4  # number of places to try until pages can be dropped
# An aligned range: the page cache adds and drops groups of up to this size.
_DROPPED_BYTES = 2 << 20
# File systems that keep all their files in the page cache.
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")

Reads = Literal["direct", "refused", "silently buffered"]


def how_reads_go(file: Path) -> Reads:
    """Return how the system handles O_DIRECT reads of a file, tested with a few pieces.

    The result is "direct" if they bypass the page cache, or if this cannot be found out. It is
    "refused" also for a file smaller than a page.
    """
    if not hasattr(os, "O_DIRECT"):  # not Linux
        return "refused"
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return "refused"
    try:
        return _try_reading(descriptor)
    except OSError:
        return "refused"
    finally:
        os.close(descriptor)


def _try_reading(descriptor: int) -> Reads:
    last = os.fstat(descriptor).st_size // mmap.PAGESIZE * mmap.PAGESIZE
    piece = min(_PIECE_BYTES // mmap.PAGESIZE * mmap.PAGESIZE or mmap.PAGESIZE, last)
    if piece == 0:
        return "refused"
    with mmap.mmap(-1, piece) as buffer:
        for number in range(_PLACES):
            place = (last - piece) * number // _PLACES // _DROPPED_BYTES * _DROPPED_BYTES
            os.posix_fadvise(descriptor, place, _DROPPED_BYTES, os.POSIX_FADV_DONTNEED)
            was_dropped = _num_cached(descriptor, place, piece) == 0
            if os.preadv(descriptor, [buffer], place) != piece:
                return "refused"
            if was_dropped:
                is_cached = _num_cached(descriptor, place, piece) == piece // mmap.PAGESIZE
                return "silently buffered" if is_cached else "direct"
    return "silently buffered" if _lies_in_memory(descriptor) else "direct"


def _num_cached(descriptor: int, place: int, num_bytes: int) -> int | None:
    """Return how many pages of a range of a file are in the page cache; None if unknown."""
    libc = ctypes.CDLL(None, use_errno=True)
    states = (ctypes.c_ubyte * (num_bytes // mmap.PAGESIZE))()
    with mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_COPY, offset=place) as pages:
        first = ctypes.c_char.from_buffer(pages)
        address = ctypes.c_void_p(ctypes.addressof(first))
        failed = libc.mincore(address, ctypes.c_size_t(num_bytes), states)
        del first  # otherwise the pages cannot be unmapped
    return None if failed else sum(state & 1 for state in states)


def _lies_in_memory(descriptor: int) -> bool:
    """Tell whether a file's file system exists only in the page cache, as tmpfs does."""
    number = os.fstat(descriptor).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    kinds = (line.split(" - ", 1)[1].split()[0] for line in mounts if line.split()[2] == device)
    return any(kind in _MEMORY_FILE_SYSTEMS for kind in kinds)

"""Mapped checkpoint files: reads them ahead, and drops their pages from memory."""

import ctypes
import mmap
import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from queue import SimpleQueue

from torch import Tensor, nn

from tandem.kernels.formats.weight_format import SECTION_ALIGNMENT_BYTES
from tandem.kernels.memory import allocate

_SUFFIXES = (".safetensors", ".gguf")
# The hub's cache keeps files here by hash; a snapshot has links to them.
_HUB_FOLDER = "blobs"
_CHUNK_BYTES = 8 << 20
# Enough to keep a disk's queue full. Reading costs the disk time, not the CPU.
_READERS = 4
_MADV_PAGEOUT = 21  # since Linux 5.4; older kernels refuse it, which does no harm
_MADV_POPULATE_READ = 22  # since Linux 5.14; likewise
_MAPPED_AT_ONCE_BYTES = 64 << 20
# Linux reads at most one read-ahead window per advice; this is the usual window.
_ADVISED_BYTES = 128 << 10


def copy_out_of_files(model: nn.Module) -> None:
    """Copy the dense weights out of mapped files, so that the files can be unmapped.

    A weight loaded in its file's dtype is a view of the mapped file, and a single view keeps every
    page that was read, experts included. The copy has the same alignment as the weight, because the
    last bit of torch's products depends on it.
    """
    tensors = mapped_tensors(model)
    map_ahead(tensors)
    for tensor in tensors:
        memory = allocate(tensor.nbytes + SECTION_ALIGNMENT_BYTES)
        first = (tensor.data_ptr() - memory.data_ptr()) % SECTION_ALIGNMENT_BYTES
        place = memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = place.copy_(tensor.detach())


def mapped_tensors(model: nn.Module) -> list[Tensor]:
    """Return a model's parameters and buffers that are views of mapped checkpoint files."""
    ranges = _mapped_ranges()
    return [
        tensor
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.device.type == "cpu" and _is_inside(tensor.data_ptr(), ranges)
    ]


def find_mapped() -> Callable[[Tensor], bool]:
    """Return a function that tells whether a tensor lies in a mapped checkpoint file."""
    ranges = _mapped_ranges()
    return lambda tensor: _is_inside(tensor.data_ptr(), ranges)


def places_of(tensors: Sequence[Tensor]) -> list[tuple[Path, int]] | None:
    """Return the file and byte offset of each tensor; None if any is not in a mapped file.

    A file of the hub's cache is reported by its name in the snapshot.
    """
    files, found = sorted(_mapped_files()), []
    in_snapshot = cache(_in_snapshot)
    for tensor in tensors:
        address = tensor.data_ptr()
        place = bisect_right(files, (address, 1 << 64, 0, "")) - 1
        if place < 0 or address >= files[place][1]:
            return None
        first, _, offset, name = files[place]
        found.append((in_snapshot(Path(name)), offset + address - first))
    return found


def _mapped_ranges() -> list[tuple[int, int]]:
    """Return the (begin, end) addresses of this process's mapped checkpoint files, in order."""
    return sorted((first, end) for first, end, _, _ in _mapped_files())


def _mapped_files() -> Iterator[tuple[int, int, int, str]]:
    """Yield each mapping of a checkpoint file: begin and end address, file offset, file name."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        addresses, _, offset, *_, name = line.split(maxsplit=5)
        is_of_hub = f"/{_HUB_FOLDER}/" in name and not name.endswith(" (deleted)")
        if name.endswith(_SUFFIXES) or is_of_hub:
            first, _, end = addresses.partition("-")
            yield int(first, 16), int(end, 16), int(offset, 16), name


def _in_snapshot(file: Path) -> Path:
    """Return the snapshot's link to a file of the hub's cache; return other files unchanged."""
    if file.parent.name != _HUB_FOLDER:
        return file
    links = file.parent.parent.glob("snapshots/*/*")
    return next((link for link in links if link.resolve() == file), file)


def _is_inside(address: int, ranges: list[tuple[int, int]]) -> bool:
    place = bisect_right(ranges, (address, 1 << 64)) - 1
    return place >= 0 and ranges[place][0] <= address < ranges[place][1]


def read_ahead(files: Sequence[Path], on_bytes: Callable[[int], None]) -> None:
    """Read files into the system's page cache at the disk's full speed.

    Faulting mapped pages in one by one, when experts are first used, reaches only a fraction of
    that speed. Pages already in memory are not read again. Several threads call `on_bytes` with
    the number of bytes read.
    """
    buffers: SimpleQueue[mmap.mmap] = SimpleQueue()
    for _ in range(_READERS):  # mapped, so that closing them certainly returns the memory
        buffers.put(mmap.mmap(-1, _CHUNK_BYTES))

    def read(descriptor: int, offset: int, size: int) -> None:
        if _is_cached(descriptor, offset, size):
            on_bytes(size)
            return
        buffer = buffers.get()
        try:
            count = os.preadv(descriptor, [buffer], offset)
        finally:
            buffers.put(buffer)
        on_bytes(count)

    opened = [os.open(file, os.O_RDONLY) for file in files]
    sizes = [os.fstat(descriptor).st_size for descriptor in opened]
    try:
        with ThreadPoolExecutor(_READERS, thread_name_prefix="tandem-read") as pool:
            chunks = [
                (descriptor, offset, min(_CHUNK_BYTES, size - offset))
                for descriptor, size in zip(opened, sizes, strict=True)
                for offset in range(0, size, _CHUNK_BYTES)
            ]
            try:
                for done in [pool.submit(read, *chunk) for chunk in chunks]:
                    done.result()
            except BaseException:  # also for Ctrl-C: reads that have not begun are cancelled
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        for descriptor in opened:
            os.close(descriptor)
        for _ in range(_READERS):
            buffers.get().close()


@contextmanager
def reading_along(files: Sequence[Path]) -> Iterator[None]:
    """Let the system read files ahead, one after the other, while the `with` body uses them.

    Otherwise the thread that first touches a page of a mapped file waits for the disk.
    """
    if not hasattr(os, "posix_fadvise"):  # not Linux
        yield
        return
    has_ended = threading.Event()

    def read() -> None:
        for file in files:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                for offset in range(0, os.fstat(descriptor).st_size, _ADVISED_BYTES):
                    if has_ended.is_set():
                        return
                    os.posix_fadvise(descriptor, offset, _ADVISED_BYTES, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)

    thread = threading.Thread(target=read, name="tandem-read-along", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def let_go(files: Iterable[Path]) -> None:
    """Drop files from the system's page cache, unless a process maps them."""
    if not hasattr(os, "posix_fadvise"):  # not Linux
        return
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def forget(extents: Iterable[tuple[int, int]]) -> None:
    """Drop from memory the whole pages of mapped files that lie in `extents`, (address, bytes).

    Without this, if memory cannot hold both a file and the model made from it, the system would
    drop the oldest pages, which are the next to be read. Addresses outside mapped files are
    ignored.
    """
    if sys.platform != "linux":
        return
    page, ranges, madvise = os.sysconf("SC_PAGE_SIZE"), _mapped_ranges(), _madvise()
    for first, size in _joined(extent for extent in extents if _is_inside(extent[0], ranges)):
        begin, end = -(-first // page) * page, (first + size) // page * page
        if begin < end:
            madvise(begin, end - begin, _MADV_PAGEOUT)


def _joined(extents: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the extents in order of address; adjacent and overlapping extents are joined.

    A page shared by two adjacent extents lies wholly in the joined extent only.
    """
    begin = end = 0
    for first, size in sorted(extents):
        if first > end:
            yield begin, end - begin
            begin = first
        end = max(end, first + size)
    yield begin, end - begin


def _madvise() -> Callable[[int, int, int], int]:
    madvise = ctypes.CDLL(None).madvise  # ctypes releases the GIL, so other threads go on
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


def map_ahead(
    tensors: Iterable[Tensor], on_bytes: Callable[[int], object] = lambda _: None
) -> None:
    """Map the pages of tensors into this process's page table, reading those still on the disk.

    Otherwise the first use of each page maps it: with 16 GB of experts that had been read ahead,
    this cost a third of the speed of the first 80 tokens, whereas mapping ahead takes a second.
    Several threads call `on_bytes` with the number of bytes mapped.
    """
    if sys.platform != "linux":
        return
    madvise = _madvise()

    def enter(first: int, size: int) -> None:
        madvise(first, size, _MADV_POPULATE_READ)
        on_bytes(size)

    with ThreadPoolExecutor(_READERS, thread_name_prefix="tandem-map") as pool:
        for first, size in _pieces(tensors):
            pool.submit(enter, first, size)


def _pieces(tensors: Iterable[Tensor]) -> Iterable[tuple[int, int]]:
    """Yield (address, bytes) of the tensors' pages, in pieces of at most 64 MiB."""
    page = os.sysconf("SC_PAGE_SIZE")
    for tensor in tensors:
        begin, end = tensor.data_ptr() // page * page, tensor.data_ptr() + tensor.nbytes
        for first in range(begin, end, _MAPPED_AT_ONCE_BYTES):
            yield first, min(_MAPPED_AT_ONCE_BYTES, end - first)


def _is_cached(descriptor: int, offset: int, size: int) -> bool:
    """Whether the page cache has a chunk's first and middle bytes; False if this is unknown."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        for place in (offset, offset + size // 2):
            os.preadv(descriptor, [bytearray(1)], place, os.RWF_NOWAIT)
    except OSError:  # EAGAIN: it would wait for the disk; or the flag is unknown
        return False
    return True

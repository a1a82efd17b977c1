"""Tests of measuring the disk at the model's expert size, without the page cache if possible."""

import mmap
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tandem.hardware.disk import DEPTHS, measure_disk
from tandem.hardware.page_cache import how_reads_go

EXPERT_BYTES = 5000
# The kernel's own files have no pages that come from a disk.
REFUSING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MEMORY = Path("/dev/shm")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    sizes = {"a": 1 << 20, "b": 3 * 4096 + 7, "small": 100}
    for name, size in sizes.items():
        with (tmp_path / name).open("wb") as stream:
            stream.write(os.urandom(size))
            stream.flush()
            os.fsync(stream.fileno())  # pages that are not on the disk yet cannot be dropped
    return [tmp_path / name for name in sizes]


def test_a_rate_for_each_depth(files: list[Path]) -> None:
    costs = measure_disk(files, EXPERT_BYTES, seconds=0.02)
    assert costs is not None
    assert costs.reads == ("direct" if how_reads_go(files[0]) == "direct" else "buffered")
    assert costs.piece_bytes == 8192
    assert costs.depths == DEPTHS
    assert costs.most_bytes_per_second == max(costs.bytes_per_second)


def test_pieces_are_no_larger_than_experts_files_and_a_megabyte(files: list[Path]) -> None:
    alone = measure_disk([files[1]], 1 << 30, seconds=0.0)
    assert alone is not None
    assert alone.piece_bytes == 3 * 4096
    large = measure_disk(files, 1 << 30, seconds=0.0)
    assert large is not None
    assert large.piece_bytes == 1 << 20


def test_files_below_a_page_tell_nothing(files: list[Path]) -> None:
    assert measure_disk([files[2]], EXPERT_BYTES) is None
    assert measure_disk([], EXPERT_BYTES) is None


@pytest.mark.skipif(not REFUSING.exists(), reason="this file is of Linux' sysfs")
def test_a_file_system_that_refuses_is_found() -> None:
    assert how_reads_go(REFUSING) == "refused"


@pytest.mark.skipif(not MEMORY.is_dir(), reason="no file system in memory here")
def test_a_file_system_that_buffers_in_silence_is_found() -> None:
    """Linux 6.6 and newer accept O_DIRECT for files in memory; older versions refuse it."""
    with TemporaryDirectory(dir=MEMORY) as folder:
        file = Path(folder) / "file"
        file.write_bytes(bytes(1 << 20))
        assert how_reads_go(file) in ("silently buffered", "refused")
        costs = measure_disk([file], EXPERT_BYTES, seconds=0.0)
    assert costs is not None
    assert costs.reads == "buffered"


@pytest.fixture
def direct(files: list[Path]) -> Path:
    """A file that is read without the page cache, if the temporary directory is on a disk."""
    if how_reads_go(files[0]) != "direct":
        pytest.skip("the temporary folder lies in memory")
    return files[0]


def test_buffers_that_show_in_the_page_cache_are_found(
    direct: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that accepts O_DIRECT but buffers is treated like one without O_DIRECT."""
    monkeypatch.setattr(os, "O_DIRECT", 0)
    assert how_reads_go(direct) == "silently buffered"


def test_pages_that_are_held_tell_nothing(direct: Path) -> None:
    with direct.open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as held:
        assert sum(held[:: mmap.PAGESIZE]) > 0  # mapped pages stay
        assert how_reads_go(direct) == "direct"


def test_a_file_below_a_page_is_not_read(files: list[Path]) -> None:
    assert how_reads_go(files[2]) == "refused"
    assert how_reads_go(files[2].with_name("none")) == "refused"


def test_a_system_without_direct_reads_is_measured_too(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    costs = measure_disk(files, EXPERT_BYTES, seconds=0.0)
    assert costs is not None
    assert costs.reads == "buffered"

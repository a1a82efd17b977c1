"""The disk is measured at the model's expert size, past the system's cache where it lets."""

import os
from pathlib import Path

import pytest

from tandem.hardware.disk import DEPTHS, measure_disk, reads_directly

EXPERT_BYTES = 5000
# The kernel's own files have no pages that a disk could be asked for.
REFUSING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    sizes = {"a": 1 << 20, "b": 3 * 4096 + 7, "small": 100}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(os.urandom(size))
    return [tmp_path / name for name in sizes]


def test_a_rate_for_each_depth(files: list[Path]) -> None:
    costs = measure_disk(files, EXPERT_BYTES, seconds=0.02)
    assert costs is not None
    assert costs.reads == ("direct" if reads_directly(files[0]) else "buffered")
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


def test_a_file_system_that_refuses_is_found() -> None:
    if not REFUSING.exists():
        pytest.fail("this test reads a file of Linux' sysfs; run it there")
    assert not reads_directly(REFUSING)


def test_a_system_without_direct_reads_is_measured_too(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    costs = measure_disk(files, EXPERT_BYTES, seconds=0.0)
    assert costs is not None
    assert costs.reads == "buffered"

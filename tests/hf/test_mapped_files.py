"""Tests of reading checkpoint files ahead."""

import os
from pathlib import Path

import pytest

from tandem.checkpoint.mapped_files import read_ahead

_CHUNK = 8 << 20


def sparse(path: Path, num_bytes: int) -> Path:
    with path.open("wb") as file:
        os.truncate(file.fileno(), num_bytes)
    return path


def test_every_byte_is_told_once(tmp_path: Path) -> None:
    sizes = [3 * _CHUNK, _CHUNK + 5, 7]  # the last chunk of a file is rarely whole
    files = [sparse(tmp_path / str(size), size) for size in sizes]
    for _ in range(2):  # the second time they are in memory
        told: list[int] = []
        read_ahead(files, told.append)
        assert sum(told) == sum(sizes)


def test_an_interruption_does_not_wait_for_the_rest(tmp_path: Path) -> None:
    num_chunks, reported = 64, list[int]()

    def interrupt(num_bytes: int) -> None:
        reported.append(num_bytes)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_ahead([sparse(tmp_path / "a", num_chunks * _CHUNK)], interrupt)
    assert len(reported) < num_chunks

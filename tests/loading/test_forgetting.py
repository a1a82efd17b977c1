"""Tests that a file's pages are dropped once read if memory cannot hold file and model."""

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import tandem
from tandem.checkpoint.mapped_files import forget
from tandem.forecast.sizes import model_sizes
from tandem.hf.checkpoint import open_model
from tandem.hf.config import OffloadConfig
from tandem.kernels.formats.file_rows import FileFields
from tests.architectures import result_of, tiny_inputs
from tests.loading.gguf_files import WIDE, tiny_model, write_gguf

PAGE = mmap.PAGESIZE


def mapped(file: Path) -> np.memmap[Any, np.dtype[np.uint8]]:
    with file.open("rb") as stream:
        return np.memmap(stream, np.uint8, "r")


def cached(file: Path) -> npt.NDArray[np.bool]:
    """Return, for each page of a file, whether the system's page cache has it."""
    data = mapped(file)
    flags = np.zeros(-(-len(data) // PAGE), np.uint8)
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(data.ctypes.data, len(data), flags.ctypes.data) == 0
    return flags % 2 == 1


def settle(file: Path) -> None:
    """Flush a file to its disk and read it: only clean pages can be dropped."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        stream.read()


@pytest.fixture(autouse=True)
def _on_a_disk(tmp_path: Path) -> None:
    file = tmp_path / "any"
    file.write_bytes(bytes(8 * PAGE))
    settle(file)
    with file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(file).any():
        pytest.skip("the system keeps this directory's files in memory")


@pytest.mark.parametrize("dense_dtype", ["none", "auto"])
def test_a_file_that_does_not_fit_beside_its_model(
    dense_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny_model(sizes=WIDE), "Q4_K_M")
    sizes = model_sizes(open_model(file), OffloadConfig(dense_dtype=dense_dtype))
    answers, counts = [], []
    size = file.stat().st_size
    for room in (size, size // 2, 0):
        needed = sizes.experts_bytes + sizes.total_dense_bytes + room
        monkeypatch.setattr(
            "tandem.experts.store.host_memory.available_bytes", lambda needed=needed: needed
        )
        settle(file)
        loaded = tandem.load(file, dense_dtype=dense_dtype)
        counts.append(cached(file).sum())
        with torch.no_grad():
            answers.append(result_of(loaded(**tiny_inputs(loaded))))
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])
    assert counts[0] == len(cached(file))
    assert counts[0] > counts[1] > counts[2]


def test_nothing_else_is_forgotten(tmp_path: Path) -> None:
    file, count = tmp_path / "some.gguf", 2048
    file.write_bytes(np.random.default_rng(0).bytes(count * PAGE))
    settle(file)
    own = np.ones(64 * PAGE, np.uint8)
    data = mapped(file)
    expected, first = data.copy(), data.ctypes.data
    # Two that follow each other, one that overlaps, one of another memory.
    half = count // 2
    extents = [(half, count // 4), (8, half - 8), (half + 16, 700)]
    forget([(first + at * PAGE + 1, size * PAGE) for at, size in extents])
    forget([(own.ctypes.data, own.nbytes)])
    forget([])
    is_cached = cached(file)
    assert is_cached[:9].all()
    assert is_cached[half + 717 :].all()
    assert is_cached.sum() < count
    assert np.array_equal(data, expected)
    assert own.all()


def test_where_fields_lie() -> None:
    """Test views of a checkpoint tensor: whole, transposed, some rows, one number for all rows."""
    words = torch.zeros(24, 40, dtype=torch.int32)
    scales = torch.ones(1, 1).expand(40, 6)
    for view in (words.T, words, words[3:7], words[:, 8:16]):
        (first, size), of_scales = FileFields(view, tuple(view.shape), scales).extents()
        numbers = [view[i, j].data_ptr() for i in range(len(view)) for j in range(view.shape[1])]
        assert (first, first + size) == (min(numbers), max(numbers) + 4)
        assert of_scales == (scales.data_ptr(), 4)

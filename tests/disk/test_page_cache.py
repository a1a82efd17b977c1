"""Tests that a file system that silently ignores O_DIRECT is detected once, at load."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import tandem
from tandem.core.errors import TandemWarning
from tests.disk.loading import packed_model, slots_of

MEMORY = Path("/dev/shm")
MESSAGE = "cannot bypass the page cache"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_model(tmp_path_factory.mktemp("buffered"))


@pytest.fixture
def in_memory(packed: Path) -> Iterator[Path]:
    """A copy on a file system that consists of page cache alone."""
    with TemporaryDirectory(dir=MEMORY) as folder:
        yield shutil.copytree(packed, Path(folder) / "packed")


@pytest.mark.skipif(not MEMORY.is_dir(), reason="no file system in memory here")
def test_reads_that_are_buffered_in_silence_are_reported(in_memory: Path) -> None:
    ids = torch.arange(4, 60)[None]
    with pytest.warns(TandemWarning, match=MESSAGE):
        model = tandem.load(in_memory, expert_memory="400KB")
    assert not slots_of(model).is_direct
    expected = tandem.load(in_memory)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, expected(ids).logits)
    assert slots_of(model).statistics().read_bytes > 0


def test_a_file_system_is_tried_once(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Path] = []

    def silently_buffered(file: Path) -> str:
        tried.append(file)
        return "silently buffered"

    monkeypatch.setattr("tandem.hf.disk_tier.how_reads_go", silently_buffered)
    with pytest.warns(TandemWarning, match=MESSAGE):
        model = tandem.load(packed, expert_memory="400KB")
    assert len(tried) == 1
    assert not slots_of(model).is_direct
    ids = torch.arange(4, 60)[None]
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, tandem.load(packed)(ids).logits)

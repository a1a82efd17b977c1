"""Shared fixtures of the loading tests."""

from pathlib import Path

import pytest

from tests.hf.tiny import save_tiny_checkpoint
from tests.loading.checkpoints import FORMATS, write_plain, write_quantised


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models by architecture, as they were before quantisation."""
    base = tmp_path_factory.mktemp("plain")
    names = {fmt.architecture for fmt in FORMATS.values()}
    return {name: write_plain(base / name, name) for name in sorted(names)}


@pytest.fixture(scope="session")
def quantised(plain: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model in each quantised format; tests that change files make their own."""
    base = tmp_path_factory.mktemp("quantised")
    return {
        name: write_quantised(base / name, plain[fmt.architecture], fmt)
        for name, fmt in FORMATS.items()
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny model of one layer, for tests that change its files."""
    return save_tiny_checkpoint(tmp_path / "tiny", num_hidden_layers=1)

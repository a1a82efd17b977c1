"""What several tests of commands use."""

from pathlib import Path

import pytest

from tests.hf.tiny import save_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral; tests that change files have their own."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> str:
    """The same as a command's word."""
    return str(checkpoint)

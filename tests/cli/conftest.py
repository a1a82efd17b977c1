"""What several tests of commands use."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> str:
    """A tiny Mixtral as a command's word."""
    return str(checkpoint)

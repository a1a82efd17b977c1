"""What the tests of models share."""

from pathlib import Path

import pytest

from tandem.hardware.profiles import save_profile
from tests.experts.machines import make_machine
from tests.hf.tiny import save_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral; tests that change files have their own."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with a made-up machine."""
    path = tmp_path_factory.mktemp("profiles") / "made-up.json"
    save_profile(make_machine().profile, path)
    return str(path)

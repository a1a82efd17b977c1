"""A machine to plan for."""

import pytest

from tandem.hardware.profiles import save_profile
from tests.experts.machines import make_machine


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with a made-up machine."""
    path = tmp_path_factory.mktemp("profiles") / "made-up.json"
    save_profile(make_machine().profile, path)
    return str(path)

"""Transformers or torch newer than what is tested: a line says so, and all goes on."""

from importlib.metadata import version
from pathlib import Path

import pytest

import tandem
from tandem.core.errors import TandemWarning
from tandem.forecast.machine_check import check_machine
from tandem.hf import compat


def test_what_is_installed_is_tested() -> None:
    assert [compat.untested_version(name) for name in compat.NEWEST_TESTED] == [None, None]


def test_loading_and_doctor_say_that_a_version_is_newer(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(compat.NEWEST_TESTED, "transformers", (5, 1))
    said = rf"transformers {version('transformers')} is newer than 5\.1, .* pip install"
    with pytest.warns(TandemWarning, match=said):
        tandem.load(checkpoint)
    found = {one.what: one for one in check_machine(tmp_path, num_threads=1, isa="auto")}
    assert found["transformers"].state == "slow"
    assert "newer than 5.1" in found["transformers"].remedy
    assert found["torch"].state == "good"

"""Tests that a command ends with each exit code of docs/command-line.md.

Exit code 130 is tested in test_interrupt.py.
"""

import re
import signal

import pytest

from tandem.cli.doctor import EXIT_BROKEN
from tandem.cli.failures import EXIT_INTERRUPTED, EXIT_USER_ERROR
from tandem.cli.main import main
from tandem.forecast import machine_check
from tests.conftest import REPOSITORY

DOCUMENT = (REPOSITORY / "docs" / "command-line.md").read_text(encoding="utf-8")


def test_the_document_has_every_code() -> None:
    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", DOCUMENT, re.MULTILINE)]
    assert codes == [0, EXIT_BROKEN, EXIT_USER_ERROR, EXIT_INTERRUPTED]
    assert codes == [0, 1, 2, 128 + signal.SIGINT]


def test_done_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0


def test_what_doctor_finds_broken_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_ISA", "avx9")
    monkeypatch.setattr(machine_check, "_SAMPLES", 1)
    assert main(["doctor", "--threads", "1"]) == 1
    assert "FAIL processor" in capsys.readouterr().out


def test_a_users_mistake_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "/no/such/model", "-p", "x"]) == 2

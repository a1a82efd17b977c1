"""Tests that native functions check their arguments: wrong sizes, types, devices are refused."""

import subprocess
import sys

import pytest

from tests.kernels.binding_cases import cases, public_names
from tests.kernels.binding_names import WITHOUT_MEMORY
from tests.kernels.wrong_calls import complaints


def test_every_native_function_is_listed() -> None:
    assert public_names() == cases().keys() | WITHOUT_MEMORY
    assert not cases().keys() & WITHOUT_MEMORY


@pytest.mark.parametrize("name", sorted(cases()))
def test_what_is_wrong_is_refused(name: str) -> None:
    assert complaints(name) == []


@pytest.mark.parametrize("name", sorted(set(cases()) - {"TwinStream.run", "TwinStream.start"}))
def test_right_calls_are_taken(name: str) -> None:
    case = cases()[name]
    case.call(*case.args)
    if case.then is not None:
        case.then()


def test_no_wrong_call_ends_a_process_without_asserts() -> None:
    command = [sys.executable, "-O", "-m", "tests.kernels.wrong_calls"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.split("\n")[0] == f"{len(cases())} functions refuse what is wrong"

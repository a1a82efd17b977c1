"""Tests of `tandem --version`: fast, and with -v it lists the environment."""

import gc
import subprocess
import sys
from importlib.metadata import version

import pytest

from tandem.cli.main import main
from tandem.kernels._native import available_isas


@pytest.mark.parametrize("words", [["--version"], ["--version", "-v"]])
def test_the_version_needs_no_torch(words: list[str]) -> None:
    code = (
        "import sys\nfrom tandem.cli.main import main\n"
        f"assert main({words!r}) == 0\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"tandem {version('tandem-moe')}"


def test_verbose_adds_what_it_runs_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_ISA", "portable")
    assert main(["--version"]) == 0
    (plain,) = capsys.readouterr().out.splitlines()
    assert main(["-v", "--version"]) == 0
    first, *more = capsys.readouterr().out.splitlines()
    assert first == plain
    assert {f"{name} {version(name)}" for name in ("torch", "transformers")} < set(more)
    assert more[-1] == "kernels portable"


def test_the_kernels_are_named_as_they_would_be_chosen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TANDEM_ISA", raising=False)
    assert main(["--version", "--verbose"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].removeprefix("kernels ") in available_isas()
    monkeypatch.setenv("TANDEM_ISA", "avx9")
    assert main(["--version", "-v"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "instruction set 'avx9' is not on this processor" in captured.err


def test_verbose_alone_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["-v"], ["-v", "run", "model", "-p", "x"]):
        assert main(words) == 2
        assert "-v goes with --version" in capsys.readouterr().err


def test_a_process_that_calls_main_looks_for_garbage_as_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    assert main(["--version"]) == 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == before

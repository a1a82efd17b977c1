"""Tests of `tandem completion`: the shell completes what the parsers accept."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tandem.cli.main import main
from tandem.cli.parser import COMMANDS, build_parser

ASK = """
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _tandem; printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    """A fixture: the output of `tandem completion` for each shell."""
    found = {}
    for shell in ("bash", "fish", "zsh"):
        with pytest.MonkeyPatch.context() as patch:
            lines: list[str] = []
            patch.setattr("builtins.print", lambda text, lines=lines: lines.append(text))
            assert main(["completion", shell]) == 0
            found[shell] = "\n".join(lines)
    return found


@pytest.fixture(autouse=True)
def in_a_folder_with_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)


def completed(script: str, *words: str) -> list[str]:
    """Return bash's completions of the last word."""
    command = ["bash", "--norc", "-c", script + ASK, "bash", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("tandem", ""), list(COMMANDS)),
        (("tandem", "si"), ["simulate"]),
        (("tandem", "--ver"), ["--version", "--verbose"]),
        (("tandem", "run", "--link"), ["--link-bandwidth"]),
        (("tandem", "run", "model", "--device", "c"), ["cpu", "cuda"]),
        (("tandem", "run", "--device", "=", "em"), ["emulated"]),  # as bash splits --device=em
        (("tandem", "run", "--device", "="), ["cpu", "cuda", "emulated"]),
        (("tandem", "trace", ""), ["record"]),
        (("tandem", "completion", ""), ["bash", "fish", "zsh"]),
        (("tandem", "run", ""), ["model.gguf"]),
        (("tandem", "run", "--profile", ""), ["model.gguf"]),
    ],
)
def test_bash_offers_what_may_follow(
    scripts: dict[str, str], words: tuple[str, ...], offered: list[str]
) -> None:
    assert completed(scripts["bash"], *words) == offered


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_of_every_command_is_completed(scripts: dict[str, str], command: str) -> None:
    _, by_command = build_parser([command])
    flags = [flag for action in by_command[command]._actions for flag in action.option_strings]
    assert completed(scripts["bash"], "tandem", command, "-") == flags


@pytest.mark.parametrize("shell", ["fish", "zsh"])
def test_the_other_shells_are_told_flags_values_and_help(
    scripts: dict[str, str], shell: str
) -> None:
    assert "emulated" in scripts[shell]
    assert "link-bandwidth" in scripts[shell]
    assert "read all of MODEL" in scripts[shell]


@pytest.mark.parametrize("shell", ["fish", "zsh"])
def test_the_other_shells_read_the_script(scripts: dict[str, str], shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    subprocess.run([shell, "-n"], input=scripts[shell], text=True, timeout=30, check=True)


def test_another_shell_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err

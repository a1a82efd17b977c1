"""`tandem completion`: a script that completes what the parsers know, tried in the shell itself."""

import re
import shutil
import subprocess

import pytest

from tandem.cli.main import main
from tandem.cli.parser import COMMANDS, build_parser

ASK = """
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _tandem; printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    """What `tandem completion` prints, by shell."""
    found = {}
    for shell in ("bash", "fish", "zsh"):
        with pytest.MonkeyPatch.context() as patch:
            lines: list[str] = []
            patch.setattr("builtins.print", lambda text, lines=lines: lines.append(text))
            assert main(["completion", shell]) == 0
            found[shell] = "\n".join(lines)
    return found


def completed(script: str, *words: str) -> list[str]:
    """Return what bash offers for the last of these words."""
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
        (("tandem", "run", ""), []),  # bash's own: files
        (("tandem", "run", "--profile", ""), []),
        (("tandem", "run", "--prompt", "--x"), []),  # a text, not a flag
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
    section = scripts["zsh"].partition(f"\n        {command}) ")[2].partition(";;")[0]
    assert [flag for flag in flags if f"*{flag}" not in section] == []
    in_fish = [line for line in scripts["fish"].splitlines() if f"_from {command}'" in line]
    names = re.findall(r" -(?:l|s) (\S+)", " ".join(line.partition(" -d ")[0] for line in in_fish))
    assert [flag for flag in flags if flag.lstrip("-") not in names] == []


def test_fish_is_told_values_and_quotes(scripts: dict[str, str]) -> None:
    assert "_from run' -l device -x -a 'cpu cuda emulated' -d 'cpu: every" in scripts["fish"]
    assert "-l verify -d 'read all of MODEL\\'s files" in scripts["fish"]
    assert (
        "complete -c tandem -n '__fish_seen_subcommand_from trace' -a 'record'" in scripts["fish"]
    )


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_reads_the_script(scripts: dict[str, str]) -> None:
    subprocess.run(["fish", "-n"], input=scripts["fish"], text=True, timeout=30, check=True)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_reads_the_script(scripts: dict[str, str]) -> None:
    subprocess.run(["zsh", "-n"], input=scripts["zsh"], text=True, timeout=30, check=True)


def test_another_shell_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err

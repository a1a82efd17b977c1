"""Tests of failing commands: one sentence, exit code 2, JSON for scripts, closed streams."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tandem.cli import simulate
from tandem.cli.main import main


def started_cold(redirections: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m tandem` in a shell, which does the redirections."""
    command = ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-m", "tandem"]
    return subprocess.run([*command, *words], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run", "/no/such/model", "-p", "x"], "/no/such/model is not a directory"),
        (["run", "-p", "x", "--tempreature", "1"], "did you mean '--temperature'"),
        (["run", "-p", "x", "--seed", "many"], "invalid int value: 'many'"),
        (["plan", "", "--no-measure"], "the model's name is empty"),
        (["run", "-p", "x", "--stop", ""], "--stop is empty"),
        (["rum"], "invalid choice: 'rum'"),
    ],
)
def test_with_json_a_failure_is_json_too(
    capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert main([*words, "--json"]) == 2
    captured = capsys.readouterr()
    error = json.loads(captured.out.splitlines()[-1])["error"]
    assert sentence in error["message"]
    assert error["type"].endswith("Error")
    assert captured.err.count("\n") == 1
    assert error["message"] in captured.err


def test_without_json_standard_output_stays_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rum"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("words", [["run", "\udcff", "-p", "x"], ["pack", "x", "-o", "a\udcff"]])
def test_paths_that_are_no_text_are_one_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(words) == 2
    assert "holds the byte 0xff" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--gpu-memory", "--link-bandwidth"])
def test_a_negative_size_is_named(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert main(["run", "-p", "x", "--device", "emulated", flag, "-1GB"]) == 2
    errors = capsys.readouterr().err
    assert f"{flag.removeprefix('--').replace('-', '_')} is '-1GB'; expected a" in errors


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (command, words)
        for command in ("run", "chat", "serve", "plan")
        for words in (["--gpu-memory", "8GiB"], ["--eviction", "next-use"])
    ] + [("run", ["--profile", "laptop-8gb"])],
)  # fmt: skip
def test_options_of_a_device_without_one_are_one_sentence(
    capsys: pytest.CaptureFixture[str], command: str, words: list[str]
) -> None:
    assert main([command, "no/model", *words]) == 2
    assert main([command, "no/model", *words, "--device", "cpu"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == second
    assert first.startswith(f"tandem: error: {words[0]}: only for a device beside the CPU")


@pytest.mark.parametrize("command", ["run", "chat", "serve"])
@pytest.mark.parametrize("speculate", ["mtp", "none"])
def test_two_drafters_at_once_are_one_sentence(
    capsys: pytest.CaptureFixture[str], command: str, speculate: str
) -> None:
    assert main([command, "no/model", "--draft", "small", "--speculate", speculate]) == 2
    errors = capsys.readouterr().err
    assert (
        f"--draft names a model that drafts, and --speculate {speculate} says otherwise" in errors
    )


def test_closed_input_is_an_empty_one() -> None:
    done = started_cold("<&-", "run")
    assert done.returncode == 2
    assert done.stderr.startswith("tandem: error: the prompt is empty")


@pytest.mark.parametrize("redirections", ["2>&-", ">&- 2>&-"])
def test_closed_outputs_swallow_messages(redirections: str) -> None:
    done = started_cold(f"{redirections} </dev/null", "run")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_warnings_are_one_line_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warning(_: object) -> int:
        warnings.simplefilter("always")
        warnings.warn("ours is known\nand long", stacklevel=1)
        warnings.warn_explicit("theirs", UserWarning, "/x/site-packages/foreign/a.py", 1)
        return 0

    monkeypatch.setattr(simulate, "run", warning)
    assert main(["simulate", "x"]) == 0
    assert capsys.readouterr().err == "[warning: ours is known]\n[warning of foreign: theirs]\n"


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_model_name_is_no_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", name, "-p", "x"]) == 2
    assert "the model's name is empty; give a model directory" in capsys.readouterr().err

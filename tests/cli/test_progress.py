"""Tests that progress bars become plain lines where standard error is no terminal."""

import io
import re
import sys
import threading
from pathlib import Path
from typing import cast

import pytest
from tqdm import tqdm

from tandem.cli import progress
from tandem.cli.progress import PlainProgress, progress_as_lines, shows_progress, waiting
from tests.cli.terminal import Terminal
from tests.programs import COMMAND, ENVIRONMENT, IMPORTS, TORCH_IMPORTS


class Clock:
    """A clock that tests advance by hand."""

    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def drawn(seconds: int, step: float = 1.0) -> list[str]:
    """Return the lines of a progress bar over this many seconds."""
    stream, clock = io.StringIO(), Clock()
    plain = cast(io.StringIO, PlainProgress(stream, clock))
    with tqdm(
        total=seconds, desc="Reading", file=plain, mininterval=0, miniters=1, unit="B"
    ) as bar:
        for _ in range(seconds):
            clock.seconds += step
            bar.update(1)
    return stream.getvalue().splitlines()


def test_what_is_over_in_two_seconds_shows_nothing() -> None:
    assert drawn(4, step=0.4) == []


def test_a_line_every_ten_seconds_and_one_at_the_end() -> None:
    lines = drawn(25)
    shares = [line.split("%")[0].split()[-1] for line in lines]
    assert shares == ["8", "48", "88", "100"]
    assert all("B/s" in line and "<" in line for line in lines)  # rate, remaining time
    assert not any("\r" in line for line in lines)


def test_other_text_goes_through_as_it_is() -> None:
    stream = io.StringIO()
    plain = PlainProgress(stream)
    for text in ("[a line]\n", "", "\n", "two\nlines\n"):
        assert plain.write(text) == len(text)
    assert stream.getvalue() == "[a line]\n\ntwo\nlines\n"
    assert not plain.isatty()


def test_standard_error_is_its_own_again_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stderr
    assert not shows_progress()
    with progress_as_lines():
        assert shows_progress()
        print("\r 5%", end="", file=sys.stderr)
        print("told", file=sys.stderr)
    assert sys.stderr is before
    assert capsys.readouterr().err == "told\n"


@pytest.mark.parametrize(
    ("words", "what", "imports"),
    [
        (["doctor", "--threads", "1"], "importing torch and Transformers", TORCH_IMPORTS),
        (["plan", "{}", "--no-measure"], "planning, with some layers measured", IMPORTS),
        (["profile", "{}", "--refresh"], "measuring the costs of experts", IMPORTS),
    ],
)
def test_a_wait_is_shown_on_a_terminal_and_over_before_the_next_line(
    model: str, words: list[str], what: str, imports: str, tmp_path: Path
) -> None:
    fast = "import tandem.cli.progress as p; p._FIRST_SECONDS = 1e-4\n"
    env = {**ENVIRONMENT, "TANDEM_CACHE": str(tmp_path)}
    given = [word.format(model) for word in words]
    with Terminal(given, env=env, code=fast + COMMAND, imports=imports) as terminal:
        assert terminal.close() == 0
    assert re.search(rf"{what}: \d+ s\r\n", terminal.screen), terminal.screen


def test_a_short_wait_and_a_quiet_one_show_nothing(model: str) -> None:
    with Terminal(["run", model, "-p", "x", "--max-new-tokens", "1", "-q"]) as terminal:
        assert terminal.close() == 0
    assert "importing" not in terminal.screen


def test_a_wait_in_a_pipe_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_FIRST_SECONDS", 1e-4)
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 0.0)
    drawn_one = threading.Event()
    with progress_as_lines():
        stream, write = sys.stderr, sys.stderr.write

        def noting(text: str) -> int:
            drawn_one.set()
            return write(text)

        monkeypatch.setattr(stream, "write", noting)
        with waiting("measuring"):
            assert drawn_one.wait(60)
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(re.fullmatch(r"measuring: \d+ s", line) for line in lines)

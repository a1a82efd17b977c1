"""Bars become plain lines where standard error is no terminal."""

import io
import sys
from typing import cast

import pytest
from tqdm import tqdm

from tandem.cli.progress import PlainProgress, progress_as_lines, shows_progress


class Clock:
    """Seconds that pass when they are told to."""

    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def drawn(seconds: int, step: float = 1.0) -> list[str]:
    """Return the lines of a bar that takes so many seconds."""
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

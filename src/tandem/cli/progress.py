"""Progress on standard error: bars on a terminal, a few plain lines elsewhere.

The bars of Transformers, the hub and Tandem are tqdm's, which redraws a line after a carriage
return. In a file or a pipe that would be one endless line.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

# A wait without known length shows its seconds after this time.
_FIRST_SECONDS = 1.0
# In a file or a pipe, shorter waits show nothing.
_PATIENCE_SECONDS = 2.0
_SECONDS_BETWEEN_LINES = 10.0


class PlainProgress:
    """A text stream that writes a bar as a line now and then, and passes on everything else."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        """Wrap `stream`."""
        self._stream, self._clock = stream, clock
        self._line = ""
        """The latest text of the bar; empty without a bar."""
        self._next_seconds = 0.0
        self._is_shown = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, but a bar's text only when its next line is due; returns the length."""
        if text.startswith("\r"):
            self._draw(text.strip())
        elif self._line and not text.strip("\n\x1b[A"):  # the end of a bar's line
            self._end()
        else:
            self._stream.write(text)
        return len(text)

    def _draw(self, line: str) -> None:
        now = self._clock()
        if line and not self._line:
            self._next_seconds, self._is_shown = now + _PATIENCE_SECONDS, False
        self._line = line
        if line and now >= self._next_seconds:
            self._show()
            self._next_seconds = now + _SECONDS_BETWEEN_LINES

    def _end(self) -> None:
        if self._is_shown:
            self._show()
        self._line = ""

    def _show(self) -> None:
        self._stream.write(self._line + "\n")
        self._stream.flush()
        self._is_shown = True


@contextlib.contextmanager
def progress_as_lines() -> Iterator[None]:
    """Write plain lines in place of bars, unless standard error is a terminal."""
    if sys.stderr.isatty():
        yield
        return
    with contextlib.redirect_stderr(cast(TextIO, PlainProgress(sys.stderr))):
        yield


def shows_progress() -> bool:
    """Tell whether standard error can show bars now."""
    return sys.stderr.isatty() or isinstance(sys.stderr, PlainProgress)


@contextlib.contextmanager
def waiting(what: str, *, quiet: bool = False) -> Iterator[None]:
    """Show the elapsed seconds of a task whose progress is unknown."""
    if quiet or not shows_progress():
        yield
        return
    begin, stream = time.monotonic(), sys.stderr
    is_drawn, is_over = threading.Event(), threading.Event()

    def draw() -> None:
        while not is_over.wait(_FIRST_SECONDS):
            is_drawn.set()
            stream.write(f"\r{what}: {time.monotonic() - begin:.0f} s")
            stream.flush()

    thread = threading.Thread(target=draw, name="tandem-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        if is_drawn.is_set():
            stream.write("\n")
            stream.flush()


class PackingBar:
    """Draws bytes, rate and time left on standard error."""

    def __init__(self, what: str = "packing experts") -> None:
        """Draw an empty bar with the label `what`."""
        from tqdm import tqdm

        self._bar = tqdm(desc=what, unit="B", unit_scale=True, file=sys.stderr)

    def __call__(self, done: int, total: int) -> None:
        """Show `done` of `total` bytes."""
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """End the bar and its line."""
        self._bar.close()

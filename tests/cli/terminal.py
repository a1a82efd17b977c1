"""Runs `tandem` on a pseudo-terminal, as a user at a keyboard would."""

import contextlib
import os
import pty
import select
import time
from collections.abc import Callable, Mapping

from tests.programs import COMMAND, ENVIRONMENT, IMPORTS, Program


class Terminal:
    """A program on a pseudo-terminal: sends keys and waits for expected output."""

    def __init__(
        self,
        words: list[str],
        env: Mapping[str, str] = ENVIRONMENT,
        *,
        code: str = COMMAND,
        imports: str = IMPORTS,
    ) -> None:
        self._fd, theirs = pty.openpty()
        files = (theirs, theirs, theirs)
        self._program = Program(
            words, files, code=code, env=env, has_terminal=True, imports=imports
        )
        os.close(theirs)
        self.screen = ""

    def wait_for(self, text: str, *, after: int = 0, seconds: float = 30) -> None:
        self._read_until(lambda: text in self.screen[after:], f"{text!r}", seconds)

    def type(self, text: str) -> int:
        """Send text; return the screen's length before it, so that tests see only what follows."""
        position = len(self.screen)
        os.write(self._fd, text.encode(errors="surrogateescape"))
        return position

    def press_until(self, key: str, text: str, *, after: int) -> None:
        """Press a key, and press it again if nothing happens.

        Python sees a Ctrl-C that comes between two of readline's waits only at the next key.
        """
        for _ in range(10):
            self.type(key)
            with contextlib.suppress(AssertionError):
                return self.wait_for(text, after=after, seconds=3)
        raise AssertionError(f"{key!r} never brought {text!r}: {self.screen!r}")

    def close(self) -> int:
        with contextlib.suppress(OSError):  # the other end of a pty closes with an error
            self._read_until(lambda: False, "the end", 60)
        return self._program.wait()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self._program.__exit__()
        os.close(self._fd)

    def _read_until(self, is_there: Callable[[], bool], what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_there():
            left = deadline - time.monotonic()
            is_readable = select.select([self._fd], [], [], max(left, 0))[0]
            assert is_readable, f"no {what} on the screen: {self.screen!r}"
            piece = os.read(self._fd, 4096)
            if not piece:
                return
            self.screen += piece.decode(errors="replace")

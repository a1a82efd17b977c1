"""Repairs the standard streams: opens closed streams on /dev/null, and escapes invalid bytes.

Also formats the warnings that libraries write to standard error.
"""

import contextlib
import io
import os
import select
import stat
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from tandem.core.errors import ConfigError

_PATIENCE_SECONDS = 2.0


def prepare_streams() -> None:
    """Open closed streams on /dev/null; escape bytes that are not text instead of raising."""
    if sys.stdin is None:  # as after `tandem ... <&-`
        sys.stdin = open(os.devnull)  # noqa: SIM115  (open until the end, as Python's own)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    _reconfigure(sys.stdin, "surrogateescape")  # `require_text` reports bytes that are not UTF-8
    _reconfigure(sys.stdout, "backslashreplace")
    _reconfigure(sys.stderr, "backslashreplace")


def _reconfigure(stream: TextIO, errors: str) -> None:
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=errors)


def require_text(text: str, what: str) -> str:
    """Return a user's text unchanged; raises `ConfigError` if it has bytes that are not text.

    `what` names the text in the error.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # Python represents a byte that it cannot decode as the surrogate U+DC00 plus the byte.
        byte = ord(text[error.start]) & 0xFF
        raise ConfigError(
            f"{what} holds the byte 0x{byte:02x} after {error.start} characters, which is not "
            f"{(sys.stdin.encoding or 'UTF-8').upper()}; convert it, for instance with iconv"
        ) from None
    return text


def has_piped_input() -> bool:
    """Tell whether standard input is a pipe, a socket or a file; false for a device."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # a stream without a file descriptor
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def read_input() -> str | None:
    """Return the whole of standard input; None if it is a terminal."""
    if sys.stdin.isatty():
        return None
    with contextlib.suppress(OSError, ValueError):  # not every stream supports select
        if not select.select([sys.stdin], [], [], _PATIENCE_SECONDS)[0]:
            print(
                "[reading standard input to its end; use < /dev/null to skip it]", file=sys.stderr
            )
    return require_text(sys.stdin.read(), "standard input").removeprefix("\N{BYTE ORDER MARK}")


@contextlib.contextmanager
def warnings_as_lines(*, quiet: bool) -> Iterator[None]:
    """Show each warning as one line without source code; with `quiet` show none."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not quiet:
            first_line = str(message).strip().partition("\n")[0]
            print(f"[warning{_origin(filename)}: {first_line}]", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _origin(filename: str) -> str:
    """Return " of LIBRARY" for a source file of a library; "" for Tandem's and other files."""
    parts = Path(filename).parts
    if "site-packages" not in parts or "tandem" in parts:
        return ""
    return f" of {parts[parts.index('site-packages') + 1].removesuffix('.py')}"

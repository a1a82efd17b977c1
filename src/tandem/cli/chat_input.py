"""Reads a chat's messages from a terminal or a pipe: single lines, or several in triple quotes.

On a terminal, messages can be edited, and the up arrow recalls messages of earlier chats. Pasted
text, and lines separated by Alt-Enter, form one message.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import NamedTuple

QUOTES = '"""'
_PROMPT = "> "
_PROMPT_WITHIN_QUOTES = ". "
_HISTORY_MESSAGES = 1000
# Replaces line breaks within a message in the history; users do not type this character.
_WITHIN_MESSAGE = "\x1e"
_KEYS = (
    "set enable-bracketed-paste on",
    r'"\e\C-m": "\C-v\C-j"',
    r'"\e\C-j": "\C-v\C-j"',  # what the terminal sends for keys typed during an answer
)


class Typed(NamedTuple):
    """A message as it was typed; a quoted message is never a command."""

    text: str
    is_quoted: bool


class MessageReader:
    """Reads messages from standard input: a line, or all lines between triple quotes."""

    def __init__(self, *, on_interrupt: str) -> None:
        """Set the text to print when Ctrl-C discards an unfinished message."""
        self._on_interrupt = on_interrupt

    def read(self) -> Typed | None:
        """Return the next message; None at the end of input."""
        while True:
            try:
                return self._read_message()
            except EOFError:
                print(file=sys.stderr)
                return None
            except KeyboardInterrupt:
                print(f"\n{self._on_interrupt}", file=sys.stderr)

    def _read_message(self) -> Typed:
        line = _read_line(_PROMPT)
        if not line.lstrip().startswith(QUOTES):
            return Typed(line, is_quoted=False)
        lines = [line.lstrip().removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            try:
                lines.append(_read_line(_PROMPT_WITHIN_QUOTES))
            except EOFError:  # the message ends with the input
                lines.append(QUOTES)
        text = "\n".join(lines).rstrip().removesuffix(QUOTES)
        return Typed(text.strip("\n"), is_quoted=True)


def _read_line(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)  # readline needs the prompt to redraw the line
    # Standard output is for answers, which go to a file.
    print(prompt, end="", file=sys.stderr, flush=True)
    return input()


class History:
    """Line editing for `input`, with messages of earlier chats on the up arrow.

    The history file is readable by its owner only. Without a terminal nothing is kept.
    """

    def __init__(self, file: Path, *, is_kept: bool) -> None:
        """Read the history file; an unusable file causes a warning, not an error."""
        self._file: Path | None = None
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            return
        try:
            import readline  # importing it changes what `input` does
        except ImportError:  # some builds of Python lack it: plain lines
            return
        for line in _KEYS:
            readline.parse_and_bind(line)
        if not is_kept:
            return
        try:
            _create_private(file)
            kept = file.read_text(encoding="utf-8", errors="surrogateescape")
        except OSError as error:
            print(f"[what is typed is not kept: {file}: {error.strerror}]", file=sys.stderr)
            return
        for line in kept.removesuffix("\n").split("\n") if kept else ():
            readline.add_history(line.replace(_WITHIN_MESSAGE, "\n"))
        self._file = file

    def save(self) -> None:
        """Write the history file.

        Must be called after each message, as the process may end when its terminal is closed.
        """
        if self._file is None:
            return
        import readline

        count = readline.get_current_history_length()
        numbers = range(max(0, count - _HISTORY_MESSAGES) + 1, count + 1)
        lines = (readline.get_history_item(number) for number in numbers)
        text = "".join(f"{line}".replace("\n", _WITHIN_MESSAGE) + "\n" for line in lines)
        with contextlib.suppress(OSError):  # a full disk must not end a chat
            self._file.write_text(text, encoding="utf-8", errors="surrogateescape")


def _create_private(file: Path) -> None:
    """Create the file if it does not exist, and restrict it to its owner before writing to it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
    file.chmod(0o600)

"""Chat on a terminal: line editing with history, Ctrl-C stops the answer, /exit leaves."""

import contextlib
import sys
from typing import TYPE_CHECKING

from tandem.cli.failures import failure_json, sentence_of
from tandem.core.errors import TandemError

if TYPE_CHECKING:
    from tandem.cli.session import Session

_PROMPT = "> "
_HELP = "/exit or Ctrl-D leaves, /clear forgets the conversation, Ctrl-C stops an answer"


def chat(session: "Session") -> int:
    """Talk until /exit or end of input; returns the exit code."""
    with contextlib.suppress(ImportError):  # Windows: plain lines
        import readline  # noqa: F401 - gives `input` line editing and the up arrow
    print(f"Chat with the model. {_HELP}.", file=sys.stderr)
    is_open = True
    while is_open:
        try:
            is_open = _take_turn(session)
        except KeyboardInterrupt:  # before or after the answer's tokens
            print(file=sys.stderr)
    return 0


def _take_turn(session: "Session") -> bool:
    """Do what the next line says; return whether the chat goes on."""
    line = _read_line()
    if line is None:
        return False
    match line.strip():
        case "":
            pass
        case "/exit" | "/quit":
            return False
        case "/clear":
            session.clear()
        case "/help":
            print(_HELP, file=sys.stderr)
        case command if command.startswith("/") and " " not in command:
            print(f"unknown command {command}; {_HELP}", file=sys.stderr)
        case _:
            _ask(session, line)
    return True


def _read_line() -> str | None:
    """Return the next line; None at the end of input. Ctrl-C only drops the line."""
    while True:
        try:
            if sys.stdout.isatty():
                return input(_PROMPT)  # readline must know it, to draw the line
            print(_PROMPT, end="", file=sys.stderr, flush=True)  # answers go to a file
            return input()
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            print(f"\n{_HELP}", file=sys.stderr)


def _ask(session: "Session", line: str) -> None:
    try:
        session.ask(line)
    except TandemError as error:  # a prompt that does not fit must not end the conversation
        print(f"error: {error}", file=sys.stderr)
        if session.options.json:
            print(failure_json(error, sentence_of(error)), flush=True)

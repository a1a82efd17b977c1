"""Chat on a terminal: line editing with history, Ctrl-C stops the answer, /exit leaves."""

import contextlib
import sys
from typing import TYPE_CHECKING

from tandem.core.errors import TandemError

if TYPE_CHECKING:
    from tandem.cli.run import Session

_HELP = "/exit or Ctrl-D leaves, /clear forgets the conversation, Ctrl-C stops an answer"


def chat(session: "Session") -> int:
    """Talk until /exit or end of input; returns the exit code."""
    with contextlib.suppress(ImportError):  # Windows: plain lines
        import readline  # noqa: F401 - gives `input` line editing and the up arrow
    print(f"Chat with the model. {_HELP}.", file=sys.stderr)
    while (line := _read_line()) is not None:
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit":
                break
            case "/clear":
                session.clear()
            case "/help":
                print(_HELP, file=sys.stderr)
            case command if command.startswith("/") and " " not in command:
                print(f"unknown command {command}; {_HELP}", file=sys.stderr)
            case _:
                _ask(session, line)
    return 0


def _read_line() -> str | None:
    """Return the next line; None at the end of input. Ctrl-C only drops the line."""
    while True:
        try:
            return input("> ")
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            print(f"\n{_HELP}", file=sys.stderr)


def _ask(session: "Session", line: str) -> None:
    try:
        session.ask(line)
    except KeyboardInterrupt:  # between tokens `generate_answer` handles it; here it came outside
        print(file=sys.stderr)
    except TandemError as error:  # a prompt that does not fit must not end the conversation
        print(f"error: {error}", file=sys.stderr)

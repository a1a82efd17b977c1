"""The shared part of the clients' scripts: runs tries in order and reports each one.

It runs in the client's environment, so it uses only the standard library. The report is one JSON
object a line, which `tests.clients.environment` reads.
"""

import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

_LONGEST_NOTE_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class Served:
    """The server under test, and the name of its model."""

    address: str
    name: str
    directory: Path
    """The model's files: clients read its tokenizer."""

    @property
    def base_url(self) -> str:
        """The base URL for clients of OpenAI's API."""
        return f"{self.address}/v1"


Try = Callable[[Served], str | None]
"""Tries one feature of a client; returns a note if there is one, raises if the feature fails."""


def run_command(name: str, *words: str, **options: Any) -> str:
    """Run a command of the client's environment; return its output."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name(name)), *words], stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, **options,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return done.stdout


def report(distribution: str, tries: Sequence[Try]) -> int:
    """Run all tries on the server that the command line names; return the exit code."""
    address, name, directory = sys.argv[1:]
    served = Served(address, name, Path(directory).resolve())
    _say(version=version(distribution))
    for one in tries:
        tried = one.__name__.replace("_", " ")
        try:
            note = one(served)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            _say(tried=tried, works=False, note=_reason(error))
        else:
            _say(tried=tried, works=True, note=note or "")
    return 0


def _say(**fields: object) -> None:
    """Write a line of the report with a mark, because clients print too."""
    print(f"\nREPORT {json.dumps(fields)}", flush=True)


def _reason(error: BaseException) -> str:
    """Return one line about an error: its message, or the failed assertion."""
    where = traceback.extract_tb(error.__traceback__)[-1].line
    text = f"{type(error).__name__}: {error if str(error) else where}"
    return " ".join(text.split())[:_LONGEST_NOTE_CHARACTERS]

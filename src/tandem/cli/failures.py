"""How a command fails: one sentence on standard error and, with --json, one JSON object."""

import contextlib
import errno
import json
import sys

from tandem.core.errors import TandemError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class UsageError(TandemError):
    """A command line that does not parse."""

    def __init__(self, program: str, message: str) -> None:
        """Make a sentence of `message`; `program` is the command, such as "tandem run"."""
        super().__init__(f"{message}; see {program} --help")
        self.program = program


def report_failure(error: BaseException, *, has_json: bool) -> int:
    """Print what went wrong; return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        print(file=sys.stderr)
        sentence, exit_code = "interrupted", EXIT_INTERRUPTED
    else:
        sentence, exit_code = sentence_of(error), EXIT_USER_ERROR
        program = error.program if isinstance(error, UsageError) else "tandem"
        print(f"{program}: error: {sentence}", file=sys.stderr)
    if has_json:
        with contextlib.suppress(OSError):  # standard output may be what failed
            print(failure_json(error, sentence), flush=True)
    return exit_code


def failure_json(error: BaseException, sentence: str) -> str:
    """Return the line of JSON that a failed command prints in place of its report."""
    return json.dumps({"error": {"type": type(error).__name__, "message": sentence}})


def sentence_of(error: BaseException) -> str:
    """Return one sentence that tells the user what went wrong, and where possible what to do."""
    return _what_the_system_says(error) if isinstance(error, OSError) else str(error)


def _what_the_system_says(error: OSError) -> str:
    """Return one sentence about a file that cannot be read or written, or a full disk."""
    what = error.strerror or str(error).partition("\n")[0] or type(error).__name__
    if error.errno == errno.ENOSPC:
        return "the disk is full; free some space, or set TANDEM_CACHE or the output elsewhere"
    where = f"{error.filename2 or error.filename}: " if error.filename else ""
    return f"{where}{what}; give a file or folder that can be read and written"

"""Entry point: parses the command line, runs one subcommand, turns errors into one sentence."""

import gc
import importlib
import os
import sys
from collections.abc import Sequence

from tandem.cli.failures import report_failure
from tandem.cli.parser import parse
from tandem.cli.progress import progress_as_lines
from tandem.cli.streams import prepare_streams, warnings_as_lines
from tandem.core.errors import TandemError, capacity_errors
from tandem.hardware.windows import why_not_here

# Torch and Transformers create nearly a million objects that live as long as the process. With
# Python's default threshold of 700, collections take a tenth of the start, and the last one at exit
# takes as long.
_OBJECTS_PER_COLLECTION = 1_000_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, 1, 2 or 130 (docs/command-line.md)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    prepare_streams()
    sentence = why_not_here(sys.platform)
    if sentence is not None:
        return report_failure(TandemError(sentence), has_json="--json" in words)
    if arguments is None:  # otherwise the process belongs to the caller
        gc.set_threshold(_OBJECTS_PER_COLLECTION, *gc.get_threshold()[1:])
    try:
        with capacity_errors():
            return _run(words)
    except BrokenPipeError:  # the reader of a pipe (head, less) has closed it; this is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (TandemError, OSError, KeyboardInterrupt) as error:
        return report_failure(error, has_json="--json" in words)
    finally:
        if arguments is None:
            gc.freeze()


def _run(words: list[str]) -> int:
    flags = parse(words)
    name = "version" if flags.version else flags.command
    with progress_as_lines(), warnings_as_lines(quiet=vars(flags).get("quiet", False)):
        exit_code: int = importlib.import_module(f"tandem.cli.{name}").run(flags)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())

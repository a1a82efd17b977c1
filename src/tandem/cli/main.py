"""Entry point: parses the command line, runs one subcommand, turns errors into one sentence."""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from tandem.cli.failures import UsageError, report_failure
from tandem.cli.streams import prepare_streams, warnings_as_lines
from tandem.core.errors import TandemError
from tandem.core.registry import nearest_names

# Subcommand -> one line of help; the code is in the module of that name beside this file.
COMMANDS = {
    "run": "answer a prompt or chat (without MODEL: the demo model)",
    "serve": "an OpenAI-compatible server, and a page that shows where experts run",
    "plan": "what a model will take and how fast it will be, before it is loaded",
    "doctor": "what this machine has, what is slow or broken, and what to do",
    "pack": "write a model as a packed checkpoint, which loads at the disk's speed",
    "bench": "measure the expert kernels against this machine's ceilings",
    "trace": "record what a model's routers choose",
    "calibrate": "learn a model's residual vectors from a text, and what they are worth",
    "profile": "measure what a model's experts cost on this machine",
    "simulate": "replay routing traces through the planner on a hardware profile",
}
_NEGATIVE_VALUE = re.compile(r"-[0-9.]+[^\s=]*")


class _Parser(argparse.ArgumentParser):
    """Reports mistakes as one sentence, with the nearest flag for a mistyped one."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(self.prog, message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0 done, 2 user error, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    prepare_streams()
    try:
        return _run(words)
    except BrokenPipeError:  # the reader (head, less) has gone; nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (TandemError, OSError, KeyboardInterrupt) as error:
        return report_failure(error, has_json="--json" in words)


def _run(words: list[str]) -> int:
    parser = _parser(words[0] if words else "")
    flags, unknown = parser.parse_known_args(_with_negative_values(words))
    if unknown:
        _refuse_unknown(parser, flags, unknown)
    with warnings_as_lines(quiet=getattr(flags, "quiet", False)):
        exit_code: int = importlib.import_module(f"tandem.cli.{flags.command}").run(flags)
    return exit_code


def _with_negative_values(words: list[str]) -> list[str]:
    """Join `--flag -1GB` as `--flag=-1GB`: argparse takes it for a flag, and the flag for alone."""
    joined: list[str] = []
    for word in words:
        if joined and re.fullmatch("--[a-z-]+", joined[-1]) and _NEGATIVE_VALUE.fullmatch(word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _parser(command: str) -> argparse.ArgumentParser:
    """Build the parser; only the called subcommand's module is loaded for its flags."""
    parser = _Parser(
        prog="tandem",
        description="Mixture-of-Experts models on one small GPU: CPU and GPU work together.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, help_line in COMMANDS.items():
        sub = subparsers.add_parser(name, help=help_line, description=help_line, allow_abbrev=False)
        if name == command:
            importlib.import_module(f"tandem.cli.{name}").add_arguments(sub)
            sub.set_defaults(parser=sub)
    return parser


def _refuse_unknown(
    parser: argparse.ArgumentParser, flags: argparse.Namespace, unknown: list[str]
) -> NoReturn:
    sub: argparse.ArgumentParser = getattr(flags, "parser", parser)
    known = [name for action in sub._actions for name in action.option_strings]
    word = unknown[0].partition("=")[0]
    hint = f"; {nearest_names(word, known)}" if word.startswith("-") else ""
    sub.error(f"unknown argument {word!r}{hint}")


class _Version(argparse.Action):
    """Prints the version; looked up only when asked for."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: object) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> None:
        import tandem

        print(f"tandem {tandem.__version__}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())

"""The command line's grammar: commands, flags, and errors of one sentence."""

import argparse
import importlib
import re
from collections.abc import Collection, Sequence
from typing import NoReturn

from tandem.cli.failures import UsageError
from tandem.core.config import RARE
from tandem.core.registry import nearest_names

# Subcommand -> one line of help. Its code is in the module of the same name in this directory.
COMMANDS = {
    "run": "answer a prompt or chat (without MODEL: the demo model)",
    "chat": "chat on a terminal; from a pipe, each line is a message",
    "serve": "start an OpenAI-compatible server, with a page that shows where experts run",
    "plan": "forecast a model's memory and speed before it is loaded",
    "doctor": "check this machine: what it has, what is slow or broken, and what to do",
    "datapoint": "write this machine's hardware and speed to an anonymous file; nothing is sent",
    "pack": "write a model as a packed checkpoint, which loads at the disk's speed",
    "models": "list the models on this machine, or remove some",
    "compare": "compare the speed and answers of Tandem and llama.cpp on one GGUF file",
    "bench": "measure a model's speed, or the expert kernels', against this machine's ceilings",
    "quality": "measure a model's loss against a reference: divergence and perplexity by domain",
    "importance": "collect the importance of matrices' inputs, for rounding weights",
    "trace": "record what a model's routers choose",
    "calibrate": "learn a model's residual vectors from a text, and measure how well they predict",
    "profile": "measure what a model's experts cost on this machine",
    "simulate": "replay routing traces through the planner on a hardware profile",
    "completion": "print a script that completes commands and flags in your shell",
}
_VERBOSE = ("bench", "simulate")  # they have a --verbose of their own
_NEGATIVE_VALUE = re.compile(r"-[0-9.]+[^\s=]*")


class _Parser(argparse.ArgumentParser):
    """Raises `UsageError` for mistakes, and leaves rarely used flags out of the help."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(self.prog, message)

    def format_help(self) -> str:
        """Return the help without rarely used flags."""
        rare = _rare_actions(self)
        for action in rare:
            action.help = argparse.SUPPRESS
        more = f"\n--help-all shows {len(rare)} more flags.\n" if rare else ""
        return super().format_help() + more


class _HelpAll(argparse.Action):
    """Prints the help with all flags."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(argparse.ArgumentParser.format_help(parser), end="")
        parser.exit()


def _rare_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the flags that `--help` leaves out."""
    groups = (group for group in parser._action_groups if group.title == RARE)
    return [action for group in groups for action in group._group_actions]


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; raises `UsageError` if a word is wrong or missing."""
    parser, _ = build_parser([word for word in words if not word.startswith("-")][:1])
    flags, unknown = parser.parse_known_args(_with_negative_values(words))
    if unknown:
        _refuse_unknown(parser, flags, unknown)
    if flags.verbose and flags.command not in _VERBOSE and not flags.version:
        parser.error("-v goes with --version")
    if flags.command is None and not flags.version:
        parser.error("the following arguments are required: COMMAND")
    return flags


def build_parser(
    commands: Collection[str],
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the whole parser, and the parser of each command.

    Only the modules of `commands` are loaded; other commands' parsers have no flags.
    """
    parser = _Parser(
        prog="tandem",
        description="Mixture-of-Experts models on one small GPU: CPU and GPU work together.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument(
        "-v", "--verbose", action="store_true",
        help="with --version: also print those of torch and Transformers, and the kernels' "
        "instruction set",
    )  # fmt: skip
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    by_command: dict[str, argparse.ArgumentParser] = {}
    for name, help_line in COMMANDS.items():
        sub = subparsers.add_parser(name, help=help_line, description=help_line, allow_abbrev=False)
        by_command[name] = sub
        if name in commands:
            importlib.import_module(f"tandem.cli.{name}").add_arguments(sub)
            sub.set_defaults(parser=sub)
            if _rare_actions(sub):
                sub.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all flags")
    return parser, by_command


def _with_negative_values(words: Sequence[str]) -> list[str]:
    """Join `--flag -1GB` as `--flag=-1GB`, because argparse would take -1GB for another flag."""
    joined: list[str] = []
    for word in words:
        if joined and re.fullmatch("--[a-z-]+", joined[-1]) and _NEGATIVE_VALUE.fullmatch(word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _refuse_unknown(
    parser: argparse.ArgumentParser, flags: argparse.Namespace, unknown: list[str]
) -> NoReturn:
    sub: argparse.ArgumentParser = vars(flags).get("parser", parser)
    known = [name for action in sub._actions for name in action.option_strings]
    word = unknown[0].partition("=")[0]
    hint = f"; {nearest_names(word, known)}" if word.startswith("-") else ""
    sub.error(f"unknown argument {word!r}{hint}")

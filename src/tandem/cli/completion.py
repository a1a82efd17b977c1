"""`tandem completion`: prints a script that completes commands, flags and their values in a shell.

The script is written from the parsers, so it knows what they know; it starts no Python.
"""

import argparse
import shlex
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tandem.cli.parser import COMMANDS, build_parser


class Flag(NamedTuple):
    """A flag as a shell needs it: `takes` is its value's name, or None if it takes none."""

    names: tuple[str, ...]
    help: str
    takes: str | None
    choices: tuple[str, ...]


class Grammar(NamedTuple):
    """What may follow a command; where `words` are none of them, files are meant."""

    flags: list[Flag]
    words: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tandem completion`."""
    parser.add_argument(
        "shell", choices=sorted(_WRITERS),
        help='bash: put eval "$(tandem completion bash)" into ~/.bashrc; zsh: likewise, ~/.zshrc; '
        "fish: write it to ~/.config/fish/completions/tandem.fish",
    )  # fmt: skip


def run(flags: argparse.Namespace) -> int:
    """Print the script; returns the exit code."""
    parser, by_command = build_parser(COMMANDS)
    commands = {name: _grammar_of(sub) for name, sub in by_command.items()}
    print("\n".join(_WRITERS[flags.shell](_grammar_of(parser), commands)))
    return 0


def _grammar_of(parser: argparse.ArgumentParser) -> Grammar:
    flags: list[Flag] = []
    words: list[str] = []
    for action in parser._actions:
        choices = tuple(str(choice) for choice in action.choices or ())
        if action.option_strings:
            names = tuple(action.option_strings)
            flags.append(Flag(names, _help_of(action, parser), _value_of(action), choices))
        else:
            words += choices
    return Grammar(flags, tuple(words))


def _value_of(action: argparse.Action) -> str | None:
    if action.nargs == 0:
        return None
    return str(action.metavar or action.dest)


def _help_of(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    text = action.help or ""
    return " ".join((text % {**vars(action), "prog": parser.prog}).split())


def _bash(top: Grammar, commands: dict[str, Grammar]) -> Iterator[str]:
    """Yield the lines for bash; where nothing is completed, bash offers files."""
    yield "# Completes tandem in bash, from `tandem completion bash`."
    yield "_tandem() {"
    yield "  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}"
    yield "  local command= flags= words= word"
    # bash splits --flag=value into three words.
    yield '  if [[ $current == "=" ]]; then current='
    yield '  elif [[ $previous == "=" ]]; then previous=${COMP_WORDS[COMP_CWORD-2]}; fi'
    yield '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do'
    yield "    if [[ $word != -* ]]; then command=$word; break; fi"
    yield "  done"
    yield "  case $command in"
    for name, grammar in {"''": top, **commands}.items():
        flags = shlex.join(name for flag in grammar.flags for name in flag.names)
        yield f"    {name}) flags='{flags}' words='{' '.join(grammar.words)}' ;;"
    yield "  esac"
    yield '  case "$command $previous" in'
    for name, grammar in commands.items():
        for choices, flags_of_them in _by_choices(grammar).items():
            patterns = "|".join(f'"{name} {flag}"' for flag in flags_of_them)
            yield f"    {patterns}) flags= words='{' '.join(choices)}' ;;"
    yield "  esac"
    yield "  if [[ $current == -* ]]; then words=$flags; fi"
    yield '  COMPREPLY=($(compgen -W "$words" -- "$current"))'
    yield "}"
    yield "complete -o default -F _tandem tandem"


def _by_choices(grammar: Grammar) -> dict[tuple[str, ...], list[str]]:
    """Return the flags that take a value, by the values that they take; () is any."""
    found: dict[tuple[str, ...], list[str]] = {}
    for flag in grammar.flags:
        if flag.takes is not None:
            found.setdefault(flag.choices, []).extend(flag.names)
    return found


def _zsh(top: Grammar, commands: dict[str, Grammar]) -> Iterator[str]:
    """Yield the lines for zsh: flags with their help."""
    yield "#compdef tandem"
    yield "# Completes tandem in zsh, from `tandem completion zsh`."
    yield "_tandem() {"
    yield "  local state line curcontext=$curcontext"
    yield "  local -a commands=("
    for name, help_line in COMMANDS.items():
        yield f"    {shlex.quote(f'{name}:{help_line}')}"
    yield "  )"
    yield "  _arguments -C \\"
    yield from (f"    {shlex.quote(spec)} \\" for spec in _zsh_flags(top))
    yield "    '1:command:->command' '*::argument:->argument'"
    yield "  case $state in"
    yield "    command) _describe command commands ;;"
    yield "    argument)"
    yield "      case $words[1] in"
    for name, grammar in commands.items():
        yield f"        {name}) _arguments \\"
        yield from (f"          {shlex.quote(spec)} \\" for spec in _zsh_flags(grammar))
        # A word of a list comes first; everything else that is no flag is a file.
        first = f"'1: :({' '.join(grammar.words)})' " if grammar.words else ""
        yield f"          {first}'*: :_files' ;;"
    yield "      esac ;;"
    yield "  esac"
    yield "}"
    # From a file of $fpath this runs in the function of its name; from ~/.zshrc it does not.
    yield 'if [[ "${funcstack[1]}" == _tandem ]]; then _tandem "$@"'
    yield "else compdef _tandem tandem; fi"


def _zsh_flags(grammar: Grammar) -> Iterator[str]:
    for flag in grammar.flags:
        value = ""
        if flag.takes is not None:
            action = f"({' '.join(flag.choices)})" if flag.choices else "_files"
            value = f":{_escaped(flag.takes)}:{action}"
        for name in flag.names:
            equals = "=" if value and name.startswith("--") else ""
            yield f"*{name}{equals}[{_escaped(flag.help)}]{value}"


def _escaped(text: str) -> str:
    for sign in ("\\", "[", "]", ":"):
        text = text.replace(sign, "\\" + sign)
    return text


def _fish(top: Grammar, commands: dict[str, Grammar]) -> Iterator[str]:
    """Yield the lines for fish: one for each command, flag and list of words."""
    yield "# Completes tandem in fish, from `tandem completion fish`."
    first = "__fish_use_subcommand"
    for name, help_line in COMMANDS.items():
        yield f"complete -c tandem -n {first} -f -a {name} -d {_fish_quoted(help_line)}"
    for name, grammar in {"": top, **commands}.items():
        when = f"'__fish_seen_subcommand_from {name}'" if name else first
        begin = f"complete -c tandem -n {when}"
        if grammar.words and name:
            yield f"{begin} -a {_fish_quoted(' '.join(grammar.words))}"
        for flag in grammar.flags:
            names = " ".join(
                f"-l {each[2:]}" if each.startswith("--") else f"-s {each[1:]}"
                for each in flag.names
            )
            value = "" if flag.takes is None else " -r"
            if flag.choices:
                value = f" -x -a {_fish_quoted(' '.join(flag.choices))}"
            yield f"{begin} {names}{value} -d {_fish_quoted(flag.help)}"


def _fish_quoted(text: str) -> str:
    for sign in ("\\", "'"):
        text = text.replace(sign, "\\" + sign)
    return f"'{text}'"


_WRITERS: dict[str, Callable[[Grammar, dict[str, Grammar]], Iterator[str]]] = {
    "bash": _bash,
    "fish": _fish,
    "zsh": _zsh,
}

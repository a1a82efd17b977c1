"""`tandem completion`: prints a script that completes commands, flags and their values in a shell.

shtab generates the script from the parsers; the script itself starts no Python.
"""

import argparse

from tandem.cli.parser import COMMANDS, build_parser

# bash splits --flag=value into three words; shtab's function takes each of them for a value.
_BASH_EQUALS = """
_tandem() {
  local words=() word current=${COMP_WORDS[COMP_CWORD]}
  for word in "${COMP_WORDS[@]:0:COMP_CWORD}"; do [[ $word == "=" ]] || words+=("$word"); done
  COMP_CWORD=${#words[@]} COMP_WORDS=("${words[@]}" "${current#=}")
  _shtab_tandem
}
complete -o bashdefault -F _tandem tandem"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tandem completion`."""
    parser.add_argument(
        "shell", choices=("bash", "fish", "zsh"),
        help='bash: put eval "$(tandem completion bash)" into ~/.bashrc; zsh: likewise, ~/.zshrc; '
        "fish: write it to ~/.config/fish/completions/tandem.fish",
    )  # fmt: skip


def run(flags: argparse.Namespace) -> int:
    """Print the script; returns the exit code."""
    import shtab

    parser, by_command = build_parser(COMMANDS)
    for each in (parser, *by_command.values()):
        for action in each._actions:
            if action.nargs != 0 and not action.choices:  # a value that is not one of a list
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, flags.shell) + (_BASH_EQUALS if flags.shell == "bash" else ""))
    return 0

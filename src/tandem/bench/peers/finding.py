"""Finds llama.cpp on this machine: its programs, and the library in package llama-cpp-python."""

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from tandem.core.errors import ConfigError

LLAMA_CPP = "llama.cpp"
INSTALL = "pip install llama-cpp-python"
_BENCH, _PACKAGE = "llama-bench", "llama-cpp-python"
# llama.cpp's programs that are installed next to llama-bench.
_SIBLINGS = (_BENCH, "llama-cli", "llama-server", "llama-completion")


@dataclass(frozen=True, slots=True)
class Peer:
    """A program or library to compare Tandem with."""

    name: str
    command: tuple[str, ...]
    """The benchmark command, which must accept llama-bench's options; empty if there is only the
    library."""
    has_library: bool
    """Whether the library is installed, which can report first choices."""


def find_peer(command: str = LLAMA_CPP, path: str | None = None) -> Peer:
    """Return llama.cpp as installed here, or the program that `command` names.

    `command` may have options after the program. `path`, if given, is searched for programs instead
    of PATH. Raises `ConfigError` with advice if nothing is found.
    """
    library = _library_version()
    if command != LLAMA_CPP:
        words = _words(command)
        return Peer(Path(words[0]).name, _command(words, path), library is not None)
    program = next(filter(None, (_sibling_bench(name, path) for name in _SIBLINGS)), None)
    if program is not None:
        return Peer(LLAMA_CPP, (program,), library is not None)
    if library is None:
        raise ConfigError(
            f"llama.cpp was not found: neither {_BENCH} in PATH nor the package {_PACKAGE}; "
            f"{INSTALL} (it compiles for this processor), or name {_BENCH} in --with"
        )
    return Peer(f"{LLAMA_CPP} ({_PACKAGE} {library})", (), has_library=True)


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--with {command!r}: {error}; expected PROGRAM [OPTION ...]") from None
    if not words:
        raise ConfigError(f"--with is empty; expected {LLAMA_CPP} or PROGRAM [OPTION ...]")
    return words


def _command(words: Sequence[str], path: str | None) -> tuple[str, ...]:
    """Return the command with its program's path.

    `words` begin with a program file, a directory with llama-bench, or a program in PATH. Raises
    `ConfigError` if the program does not exist.
    """
    chosen = Path(words[0]).expanduser()
    chosen = chosen / _BENCH if chosen.is_dir() else chosen
    # A path is not looked up in PATH. It must be made absolute because `Path` drops a leading "./".
    named = str(chosen.absolute() if os.sep in words[0] else chosen)
    program = shutil.which(named, path=path)
    if program is None:
        raise ConfigError(
            f"there is no program {words[0]!r}; name {LLAMA_CPP}, or a program with {_BENCH}'s "
            "options"
        )
    if Path(program).name != _BENCH and (bench := _sibling_bench(program, path)) is not None:
        program = bench
    return (program, *words[1:])


def _sibling_bench(name: str, path: str | None) -> str | None:
    """Return the llama-bench in the directory of a llama.cpp program; None if it does not exist."""
    program = shutil.which(name, path=path)
    if program is None or Path(program).name not in _SIBLINGS:
        return None
    return shutil.which(str(Path(os.path.realpath(program)).parent / _BENCH))


def _library_version() -> str | None:
    if find_spec("llama_cpp") is None:
        return None
    try:
        return version("llama-cpp-python")
    except PackageNotFoundError:
        return "?"

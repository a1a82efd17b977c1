"""The grammar process: writes grammars and builds their matchers where it may be killed.

Stdin is a socket of the HTTP side, which starts this process. Order: a pickled `Tables` comes
first, then one descriptor for each grammar: a socket with a pickled `Build`. For each one this
process forks; it has one thread and no torch, so that a fork is safe, and the tokenizer's tables
are built once. The fork says `STARTED`, works, answers with JSON, and ends. The kernel ends it by a
signal where it uses too much processor time, or where the other end is closed. This process ends
when its stdin does, thus with the server, however that ends.
"""

import contextlib
import copy
import fcntl
import json
import os
import pickle
import resource
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import llguidance

import tandem.dialects.tool_grammar  # noqa: F401  (what writes grammars: ahead of the forks)
from tandem.core.errors import ConfigError, TandemError, first_line
from tandem.dialects.grammar import LIMITS, complaint
from tandem.foreign_types import Tokenizer

GrammarJob = Callable[[], str | None]
"""Writes a grammar (None: it cannot be ruled); pickled by name."""
STARTED = b"s"
_LENGTH = struct.Struct("<Q")
# The model's threads go first.
_NICENESS = 10
# What one grammar may take beside the tables: those that pass take some tens of MB.
_MEMORY_BYTES = 1 << 30


class Tables(NamedTuple):
    """What the tokenizer's tables are built of."""

    tokenizer: str | None
    """As the tokenizers library writes it; None: it has none of its kind."""
    vocabulary: int
    end_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocabulary: int, end_ids: Sequence[int]) -> "Tables":
        """Return those of a tokenizer, for a vocabulary as wide as the model's scores."""
        backend = copy.copy(getattr(tokenizer, "backend_tokenizer", None))
        if backend is None:
            return cls(None, vocabulary, tuple(end_ids))
        backend.no_padding()
        backend.no_truncation()
        return cls(backend.to_str(), vocabulary, tuple(end_ids))

    def build(self) -> llguidance.LLTokenizer:
        """Build them, which may take a second; raises `ConfigError` where there are none."""
        why = "it has no fast tokenizer"
        if not self.end_ids:
            why = "the tokenizer has no end-of-sequence token"
        elif self.tokenizer is not None:
            ends = [*self.end_ids]
            try:
                return llguidance.LLTokenizer(self.tokenizer, self.vocabulary, eos_token=ends)
            except (ValueError, RuntimeError) as error:
                why = first_line(error)
        raise ConfigError(f"this model cannot follow a grammar: {why}")


class Build(NamedTuple):
    """Write a grammar and build its matcher."""

    job: bytes
    """A pickled `GrammarJob`."""
    processor_seconds: float
    wall_seconds: float


def framed(message: object) -> bytes:
    """Return a message as this process reads it."""
    data = pickle.dumps(message)
    return _LENGTH.pack(len(data)) + data


def main() -> None:
    """Serve until stdin ends."""
    os.nice(_NICENESS)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets forks that have ended
    control = socket.socket(fileno=0)
    with contextlib.suppress(EOFError):
        tokenizer = _built_tables(_read(control))
        while True:
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not descriptors:
                return
            with socket.socket(fileno=descriptors[0]) as connection:
                if os.fork() == 0:
                    control.close()  # else it would outlive this process
                    _be_fork(connection, tokenizer)


def new_matcher(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """Return what follows a grammar from its beginning; it may be in error, and never raises."""
    return llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)


def _built_tables(tables: Tables) -> llguidance.LLTokenizer | ConfigError:
    """Return the tables, or why there are none."""
    try:
        tokenizer = tables.build()
    except ConfigError as error:
        return error
    new_matcher(tokenizer, 'start: "a"').compute_bitmask()  # what is made on first use
    return tokenizer


def _be_fork(connection: socket.socket, tokenizer: llguidance.LLTokenizer | ConfigError) -> None:
    """Build one grammar, answer, and end this fork."""
    try:
        build = _read(connection)
        _limit(connection, build)
        connection.sendall(STARTED)
        answer = _built(build, tokenizer)
        signal.signal(signal.SIGIO, signal.SIG_IGN)  # the reader makes room for more
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(json.dumps(answer).encode())
    finally:
        os._exit(0)


def _limit(connection: socket.socket, build: Build) -> None:
    """Let the kernel end this fork: these signals do, as none of them is handled."""
    number = connection.fileno()
    fcntl.fcntl(number, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | os.O_ASYNC)
    signal.setitimer(signal.ITIMER_REAL, build.wall_seconds)
    signal.setitimer(signal.ITIMER_PROF, build.processor_seconds)
    with open("/proc/self/statm", encoding="ascii") as file:
        num_bytes = int(file.read().split()[0]) * resource.getpagesize() + _MEMORY_BYTES
    with contextlib.suppress(ValueError, OSError):  # a lower limit is there
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def _built(build: Build, tokenizer: llguidance.LLTokenizer | ConfigError) -> dict[str, str | None]:
    """Return {"grammar": its text} of one whose first mask is there, or {"problem": why not}."""
    try:
        grammar = pickle.loads(build.job)()
    except TandemError as error:
        return {"problem": str(error)}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return {"problem": f"the grammar cannot be written ({type(error).__name__})"}
    if grammar is None:
        return {"grammar": None}
    if isinstance(tokenizer, ConfigError):
        return {"problem": str(tokenizer)}
    matcher = new_matcher(tokenizer, grammar)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return {"problem": complaint(matcher.get_error())} if matcher.is_error() else {
        "grammar": grammar
    }  # fmt: skip


def _read(connection: socket.socket) -> Any:
    """Return the next message, `Tables` or `Build`; `EOFError` at the end."""
    (length,) = _LENGTH.unpack(_read_bytes(connection, _LENGTH.size))
    return pickle.loads(_read_bytes(connection, length))


def _read_bytes(connection: socket.socket, length: int) -> bytearray:
    data = bytearray()
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data

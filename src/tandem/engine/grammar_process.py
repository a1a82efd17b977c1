"""The grammar process: writes grammars and builds their matchers, in forks that may be killed.

The process is a helper (`tandem.engine.helper`): it first receives `Tables`, then forks for each
`Build`. It has one thread and no torch, so that forking is safe, and builds the tokenizer's tables
once. A fork is killed if it exceeds its limits or its client has closed the connection.
"""

import contextlib
import copy
import hashlib
import os
import pickle
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import llguidance

import tandem.dialects.tool_grammar  # noqa: F401  (what writes grammars: ahead of the forks)
from tandem.core.errors import ConfigError, TandemError, first_line
from tandem.dialects.grammar import LIMITS, complaint
from tandem.engine.helper import Limits, answer_in_fork, jobs, read
from tandem.foreign_types import Tokenizer

GrammarJob = Callable[[], str | None]
"""A function that returns a grammar, or None if none can be written; pickled by name."""
# The model's threads have priority.
_NICENESS = 10


class Tables(NamedTuple):
    """The inputs from which llguidance's tables for a tokenizer are built."""

    tokenizer: str | None
    """The tokenizer in the tokenizers library's format; None if it is of another kind."""
    vocabulary: int
    end_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocabulary: int, end_ids: Sequence[int]) -> "Tables":
        """Return the inputs for a tokenizer; `vocabulary` is the size of the model's logits."""
        backend = copy.copy(getattr(tokenizer, "backend_tokenizer", None))
        if backend is None:
            return cls(None, vocabulary, tuple(end_ids))
        backend.no_padding()
        backend.no_truncation()
        return cls(backend.to_str(), vocabulary, tuple(end_ids))

    def build(self) -> llguidance.LLTokenizer:
        """Build and return the tables, which may take a second.

        Raises `ConfigError` for an unsupported tokenizer.
        """
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


class Writer(NamedTuple):
    """A pickled `GrammarJob`."""

    data: bytes
    key: bytes
    """Requests with equal keys have the same grammar."""

    @classmethod
    def of(cls, job: GrammarJob) -> "Writer":
        """Pickle a job."""
        data = pickle.dumps(job)
        return cls(data, hashlib.sha256(data).digest())


class Build(NamedTuple):
    """A job for the grammar process: write a grammar and build its matcher within limits."""

    writer: bytes
    """A pickled `GrammarJob`."""
    limits: Limits


def main() -> None:
    """Run as the grammar process until stdin is closed."""
    os.nice(_NICENESS)
    control = socket.socket(fileno=0)
    with contextlib.suppress(EOFError):
        work = partial(_built, tokenizer=_built_tables(read(control)))
        for _, connection in jobs(control):
            answer_in_fork(control, connection, work)


def new_matcher(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """Return a matcher at the grammar's start; it never raises, but may be in an error state."""
    return llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)


def _built_tables(tables: Tables) -> llguidance.LLTokenizer | ConfigError:
    """Return the built tables, or the `ConfigError` if the tokenizer is unsupported."""
    try:
        tokenizer = tables.build()
    except ConfigError as error:
        return error
    new_matcher(tokenizer, 'start: "a"').compute_bitmask()  # creates what is built on first use
    return tokenizer


def _built(build: Build, tokenizer: llguidance.LLTokenizer | ConfigError) -> dict[str, str | None]:
    """Write a job's grammar and compute its first mask.

    Returns {"grammar": text}, {"grammar": None} if the job's writer returned None, or
    {"problem": reason}.
    """
    try:
        grammar = pickle.loads(build.writer)()
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

"""Answers that follow a grammar, by llguidance: JSON of a schema, or a call of a tool.

A grammar travels as the library's own text; it is checked where the request arrives and followed
where tokens are chosen.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import torch
from torch import Tensor

from tandem.core.errors import ConfigError

# One space at most: without a bound a weak model writes white space for ever, and pretty JSON costs
# twice the tokens.
_COMPACT = {"whitespace_pattern": " ?"}
_SPACE_RULE = 'space: (" " | "\\n")?'


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of a JSON schema's documents; `ConfigError` if it cannot be followed."""
    return _checked(
        llguidance.LLMatcher.grammar_from_json_schema(dict(schema), overrides=_COMPACT)  # type: ignore[arg-type]
    )


def call_grammar(tools: Sequence[tuple[str, Mapping[str, Any]]], opening: str, closing: str) -> str:
    """Return the grammar of one call of one of some tools, given as (name, schema).

    `opening` and `closing` are the tags that the model's format puts around
    {"name": ..., "arguments": ...}; a line may end after the one and before the other.
    """
    calls = []
    for name, schema in tools:
        words = ["{", '"name":', f"{json.dumps(name)},", '"arguments":']
        rule = json.dumps({**schema, "x-guidance": _COMPACT})
        calls.append(f"({_spaced(words)} space %json {rule} space {_spaced(['}'])})")
    around = (json.dumps(opening), f"({' | '.join(calls)})", json.dumps(closing))
    lark = f"start: {' space '.join(around)}\n{_SPACE_RULE}"
    return _checked(llguidance.LLMatcher.grammar_from_lark(lark))


def _spaced(words: Sequence[str]) -> str:
    return " space ".join(json.dumps(word) for word in words)


def _checked(grammar: str) -> str:
    problem = llguidance.LLMatcher.validate_grammar(grammar)
    if problem and not problem.startswith("WARNING"):
        first_line = problem.strip().partition("\n")[0]
        raise ConfigError(f"the schema cannot be followed: {first_line}")
    return grammar


class Grammars:
    """Makes constraints for one tokenizer, whose tables are built in the background."""

    def __init__(self, tokenizer: Any, vocabulary: int, end_ids: Sequence[int]) -> None:
        """Begin to build the tables for a vocabulary as wide as the model's scores."""
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._vocabulary = vocabulary
        self._problem = "the tokenizer has no end-of-sequence token"

        def build() -> None:
            from llguidance.hf import from_tokenizer

            try:
                self._tokenizer = from_tokenizer(tokenizer, vocabulary, list(end_ids))
            except (ValueError, RuntimeError) as error:
                self._problem = str(error).partition("\n")[0]

        self._builder = threading.Thread(target=build, daemon=True)
        if end_ids:
            self._builder.start()

    def constraint(self, grammar: str) -> "GrammarConstraint":
        """Return a fresh constraint; raises `ConfigError` where the tokenizer has no tables."""
        if self._builder.ident is not None:
            self._builder.join()
        if self._tokenizer is None:
            raise ConfigError(f"this model cannot follow a grammar: {self._problem}")
        return GrammarConstraint(self._tokenizer, grammar, self._vocabulary)


class GrammarConstraint:
    """One answer on its way through a grammar; see `generate.batching.Constraint`."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, grammar: str, vocabulary: int) -> None:
        """Stand at the grammar's beginning."""
        self._matcher = llguidance.LLMatcher(tokenizer, grammar)
        self._end_id = tokenizer.eos_token
        self._bits = torch.zeros(-(-vocabulary // 32), dtype=torch.int32)
        self._places = torch.arange(32, dtype=torch.int32)

    def restrict(self, scores: Tensor) -> Tensor:
        """Return scores (1, vocabulary) with -inf for what the grammar forbids."""
        bits = self._bits
        if self._matcher.is_error():  # a grammar that grew too complex: end what there is
            bits.zero_()
        else:
            self._matcher.unsafe_compute_mask_ptr(bits.data_ptr(), bits.numel() * 4)
        allowed = ((bits[:, None] >> self._places) & 1).flatten()[: scores.shape[-1]].bool()
        if not allowed.any():
            allowed[self._end_id] = True
        return scores.masked_fill(~allowed, float("-inf"))

    def accept(self, token: int) -> bool:
        """Take the token that came; tell whether the grammar is at its end."""
        return not self._matcher.consume_token(token) or self._matcher.is_stopped()

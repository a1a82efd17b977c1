"""Limits a model's reasoning: after a number of tokens, the mark that ends it is inserted.

Loads no torch, because `ThinkingLimit` objects are sent through a pipe.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.foreign_types import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

# The end of the reasoning is looked for in this many of the latest tokens.
_MARK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingLimit:
    """The largest number of reasoning tokens in an answer, and the marks around the reasoning."""

    num_tokens: int
    begin: str
    end: str
    closing: str
    """The text, including `end`, that is inserted to end the model's reasoning."""
    has_begun: bool
    """Whether the prompt has already opened the reasoning."""


class BoundedThinking:
    """A `Constraint` that inserts the closing text into an answer once its reasoning is too long.

    It forbids no token before that.
    """

    def __init__(self, limit: ThinkingLimit, tokenizer: Tokenizer) -> None:
        """Take the limit; `tokenizer` encodes its marks and decodes the answer."""
        self._limit = limit
        self._decode: Callable[[Sequence[int]], str] = tokenizer.decode
        self._closing, self._mark = (
            list(tokenizer(text, add_special_tokens=False)["input_ids"])
            for text in (limit.closing, limit.end)
        )
        self._tokens: list[int] = []
        self._num_thought = 0
        self._is_open, self._has_ended = limit.has_begun, False
        self._forced = self._closing if limit.has_begun and limit.num_tokens == 0 else []

    def restrict(self, scores: "Tensor") -> "Tensor":
        """Return scores (1, vocabulary) that allow only the next token to be inserted, if any.

        While nothing is being inserted, the scores are unchanged. If a grammar forbids the closing
        text, only the end mark is inserted; if the grammar forbids the mark too, nothing is.
        """
        if not self._forced:
            return scores
        if self._forced == self._closing and self._is_forbidden(scores):
            self._forced = self._mark
        if self._is_forbidden(scores):
            return scores
        only = scores.new_full(scores.shape, float("-inf"))
        only[0, self._forced[0]] = 0.0
        return only

    def _is_forbidden(self, scores: "Tensor") -> bool:
        return bool(scores[0, self._forced[0]] == float("-inf"))

    def accept(self, token: int) -> bool:
        """Count the sampled token; return False, because the answer need not end."""
        if self._forced:
            is_on_its_way = token == self._forced[0]
            self._forced = self._forced[1:] if is_on_its_way else self._closing
            self._has_ended = not self._forced
        elif not self._has_ended:
            self._tokens.append(token)
            self._look()
        return False

    def _look(self) -> None:
        """Note whether the latest token begins or ends the reasoning, or reaches its limit."""
        if not self._is_open:
            text = self._decode(self._tokens).lstrip()
            self._is_open = text.startswith(self._limit.begin)
            self._has_ended = not self._limit.begin.startswith(text[: len(self._limit.begin)])
            return
        self._num_thought += 1
        if self._limit.end in self._decode(self._tokens[-_MARK_TOKENS:]):
            self._has_ended = True
        elif self._num_thought >= self._limit.num_tokens:
            self._forced = self._closing

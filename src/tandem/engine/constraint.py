"""Constrains answers to a grammar, token by token, with llguidance."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import llguidance
import torch
from torch import Tensor

from tandem.core.errors import ConfigError
from tandem.dialects.grammar import complaint
from tandem.engine.grammar_process import Tables, new_matcher
from tandem.foreign_types import Tokenizer

# A mask that takes longer is slow. The second number limits the time that all slow masks of an
# answer take beyond that. `tandem.dialects.grammar` says why.
SLOW_MASK_SECONDS, MOST_SLOW_SECONDS = 0.05, 0.2


class Grammars:
    """Makes grammar constraints for one tokenizer, and builds their tables in the background."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, end_ids: Sequence[int]) -> None:
        """Start building the tables for `vocabulary` logits; tokens `end_ids` end an answer."""
        self._vocabulary = vocabulary
        builder = ThreadPoolExecutor(1)
        self._tables = builder.submit(lambda: Tables.of(tokenizer, vocabulary, end_ids).build())
        builder.shutdown(wait=False)

    def constraint(self, grammar: str) -> "GrammarConstraint":
        """Wait for the tables, and return a constraint that makes one answer follow `grammar`.

        Raises `ConfigError` if the tokenizer is unsupported.
        """
        return GrammarConstraint(self._tables.result(), grammar, self._vocabulary)


class GrammarConstraint:
    """Makes one answer follow a grammar; a `generate.constraints.Constraint`."""

    def __init__(
        self,
        tokenizer: llguidance.LLTokenizer,
        grammar: str,
        vocabulary: int,
        *,
        slow_mask_seconds: float = SLOW_MASK_SECONDS,
    ) -> None:
        """Begin at the grammar's start; a mask may take `slow_mask_seconds` of CPU time.

        All masks of the answer together may exceed this by at most `MOST_SLOW_SECONDS`.
        """
        self._slow_mask_seconds, self._seconds_left = slow_mask_seconds, MOST_SLOW_SECONDS
        self._matcher = new_matcher(tokenizer, grammar)
        self._end_id = tokenizer.eos_token
        self._bits = torch.zeros(-(-vocabulary // 32), dtype=torch.int32, device="cpu")
        self._places = torch.arange(32, dtype=torch.int32, device="cpu")
        self._expanded_bits = self._expanded = torch.zeros(0, dtype=torch.int32, device="cpu")

    def restrict(self, scores: Tensor) -> Tensor:
        """Return scores (1, vocabulary) with -inf for tokens that the grammar forbids.

        Raises `ConfigError` if the grammar becomes too complex or too slow to follow.
        """
        bits = self._bits
        if not self._matcher.is_error():
            # CPU time, so that a busy machine does not change which answers end.
            begin = time.thread_time()
            self._matcher.unsafe_compute_mask_ptr(bits.data_ptr(), bits.numel() * 4)
            self._note_mask(time.thread_time() - begin)
        self._require_no_error()
        if not torch.equal(bits, self._expanded_bits):  # often the same mask as before
            allowed = ((bits[:, None] >> self._places) & 1).flatten()[: scores.shape[-1]].bool()
            if not allowed.any():
                allowed[self._end_id] = True
            self._expanded_bits, self._expanded = bits.clone(), ~allowed
        return scores.masked_fill(self._expanded, float("-inf"))

    def accept(self, token: int) -> bool:
        """Advance the grammar by one token; return whether the answer is complete."""
        if not self._matcher.consume_token(token):
            self._require_no_error()
        return self._matcher.is_stopped()

    def _note_mask(self, seconds: float) -> None:
        self._seconds_left -= max(0.0, seconds - self._slow_mask_seconds)
        if self._seconds_left < 0:
            raise ConfigError(
                f"the grammar takes more than {self._slow_mask_seconds} seconds a token to be "
                "followed; the answer ended here, make it simpler"
            )

    def _require_no_error(self) -> None:
        if self._matcher.is_error():
            raise ConfigError(
                f"{complaint(self._matcher.get_error())}; the answer ended here, make it simpler"
            )

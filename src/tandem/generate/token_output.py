"""The outputs of a step, and a batch's counters. Loads no torch, because they travel through a
pipe.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tandem.core.config import option
from tandem.generate.answer import FinishReason


class TokenLogprob(NamedTuple):
    """A token's log-probability and the likeliest tokens, by the model's own logits."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class TokenOutput(NamedTuple):
    """One token of one request, with the text that is now certain."""

    request_id: int
    text: str = ""
    token_id: int | None = None
    """The token; None ends a request that asked for no tokens."""
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    """None while the request continues."""
    generated_tokens: int = 0
    reused_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Log-probabilities of the whole prompt, in the first token output, if they were requested."""
    stop_string: str | None = None
    """The stop string that ended the answer, in the last token output."""


class Failure(NamedTuple):
    """The error of some requests that a step could not serve."""

    request_ids: tuple[int, ...]
    error: Exception


class StepFailedError(Exception):
    """A step failed for some requests, which are dropped; the outputs of the others are here."""

    def __init__(self, failures: list[Failure], token_outputs: list[TokenOutput]) -> None:
        """Carry failures and outputs; no request is in two failures."""
        super().__init__("; ".join(str(failure.error) for failure in failures))
        self.failures = failures
        self.token_outputs = token_outputs


@dataclass(slots=True)
class BatchCounts:
    """A scheduler's counters; the help texts are those of the server's metrics."""

    prompt_tokens: int = option(0, help="prompt tokens that were computed")
    reused_tokens: int = option(0, help="prompt tokens that the KV cache held already")
    read_tokens: int = option(0, help="of them, those whose keys and values came from disk")
    generated_tokens: int = option(0, help="tokens that were generated")
    decode_steps: int = option(0, help="decode steps")
    drafted_tokens: int = option(0, help="drafted tokens that were verified")
    accepted_tokens: int = option(0, help="of them, those that the answers have")
    decode_seconds: float = option(0.0, help="seconds of decode steps")
    prefill_seconds: float = option(0.0, help="seconds of prefill")

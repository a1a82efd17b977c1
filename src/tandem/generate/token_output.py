"""The outputs of a step, and a batch's counters.

Loads no torch, because these objects are sent through a pipe.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tandem.core.config import option
from tandem.generate.answer import FinishReason


class TokenLogprob(NamedTuple):
    """A token's log-probability by the model's own logits, and the likeliest tokens with theirs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class TokenOutput(NamedTuple):
    """One token of one request, with the text that is now certain."""

    request_id: int
    text: str = ""
    token_id: int | None = None
    """The token; None if the output only ends the request."""
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
    """The requests that a step has dropped, and the error that caused this."""

    request_ids: tuple[int, ...]
    error: Exception


class StepFailedError(Exception):
    """A step failed for some requests, which are dropped; holds the other requests' outputs."""

    def __init__(self, failures: list[Failure], token_outputs: list[TokenOutput]) -> None:
        """Hold failures and outputs; a request must not be in two failures."""
        super().__init__("; ".join(str(failure.error) for failure in failures))
        self.failures = failures
        self.token_outputs = token_outputs


@dataclass(slots=True)
class BatchCounts:
    """A scheduler's counters; the server's metrics show their help texts."""

    prompt_tokens: int = option(0, help="prompt tokens that were computed")
    reused_tokens: int = option(0, help="prompt tokens that the KV cache held already")
    read_tokens: int = option(0, help="of them, those whose keys and values came from disk")
    generated_tokens: int = option(0, help="tokens that were generated")
    decode_steps: int = option(0, help="decode steps")
    drafted_tokens: int = option(0, help="drafted tokens that were verified")
    accepted_tokens: int = option(0, help="of them, those that the answers have")
    decode_seconds: float = option(0.0, help="seconds of decode steps")
    prefill_seconds: float = option(0.0, help="seconds of prefill")

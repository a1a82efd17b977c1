"""The result of one prompt: text, tokens, finish reason and durations."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True, slots=True)
class Answer:
    """One generated answer and how long it took."""

    text: str
    """Text without special tokens and without the stop string."""
    token_ids: list[int]
    """All new tokens, including the end-of-sequence token."""
    prompt_tokens: int
    time_to_first_token_seconds: float
    decode_seconds: float
    """Time from the first token to the last."""
    finish_reason: FinishReason
    """"stop": end-of-sequence token or stop string; "length": a limit; "interrupted": Ctrl-C."""
    reused_tokens: int = 0
    """Prompt tokens whose keys and values were already in the KV cache."""
    drafted_tokens: int = 0
    """Tokens that were drafted and verified."""
    accepted_tokens: int = 0
    """Drafted tokens that were accepted."""

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C ended the answer."""
        return self.finish_reason == "interrupted"

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens computed per second, up to the first token of the answer."""
        return _rate(self.prompt_tokens - self.reused_tokens, self.time_to_first_token_seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens per second after the first token; 0 for a single token."""
        return _rate(len(self.token_ids) - 1, self.decode_seconds)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 and count > 0 else 0.0

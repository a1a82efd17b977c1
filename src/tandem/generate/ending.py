"""When an answer ends, beyond its length and its stop strings. Loads no torch: it goes by pipe."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Added to the score of a token that may not come yet. Finite, so that a grammar that allows
# nothing else has the last word.
_LAST_RESORT = -1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOptions:
    """What a request says about its end."""

    min_tokens: int = 0
    """Before so many tokens, neither a token nor a stop string ends the answer."""
    ignores_eos: bool = False
    """Whether the model's end-of-sequence tokens do not end it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end it like end-of-sequence tokens."""
    is_prompt_only: bool = False
    """Whether it ends before its first token: the prompt alone is computed."""

    def end_ids(self, of_model: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end the answer; `of_model` ends a sequence by itself."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignores_eos else of_model)


class NotYet:
    """Keeps an answer from ending too early; a `Constraint` that ends nothing."""

    def __init__(self, min_tokens: int, end_ids: frozenset[int]) -> None:
        """Begin an answer of at least `min_tokens` tokens."""
        self._num_missing = min_tokens
        self._end_ids = sorted(end_ids)

    def restrict(self, scores: "Tensor") -> "Tensor":
        """Return scores (1, vocabulary) in which nothing ends the answer, while it may not."""
        if self._num_missing <= 0 or not self._end_ids:
            return scores
        changed = scores.float().clone()
        changed[0, self._end_ids] += _LAST_RESORT
        return changed

    def accept(self, token: int) -> bool:
        """Count the token that came."""
        self._num_missing -= 1
        return False

"""The interface of drafters, which guess the next tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

# Longer drafts are seldom accepted as a whole, and steps of more tokens are slower than decode
# steps should be.
MOST_DRAFTED = 7


class Draft(NamedTuple):
    """Tokens that may come next."""

    tokens: Sequence[int]
    evidence: Sequence[int]
    """The group of each token, such as the length of the match that it follows; tokens of one group
    share an acceptance rate, given that the tokens before them are right."""


class Drafter(Protocol):
    """Guesses the next tokens of one sequence, at negligible cost."""

    def draft(self, tokens: Sequence[int]) -> Draft:
        """Return up to `MOST_DRAFTED` tokens that may follow the sequence so far.

        `tokens` must be the same sequence at each call, with more tokens at its end.
        """

    def end(self) -> None:
        """Record that the sequence has ended; must be called once, after the last `draft`."""


class SureDraft(NamedTuple):
    """Tokens that may come next, with the drafter's confidence in each, given those before."""

    tokens: Sequence[int]
    sureness: Sequence[float] = ()
    """Probabilities from 0 to 1; empty: the drafter does not know them."""


class PaidDrafter(Protocol):
    """Guesses the next tokens of several sequences at once, at a cost."""

    def draft(
        self, histories: Mapping[int, Sequence[int]], most: Mapping[int, int], least: float
    ) -> Mapping[int, SureDraft]:
        """Return drafts by slot: up to `most[slot]` tokens each, often fewer.

        `histories` has all tokens of each sequence, by slot. A drafter that knows its confidence
        must end a draft when the chance that all its tokens are right falls below `least`.
        """


MakeDrafter = Callable[[], Drafter]

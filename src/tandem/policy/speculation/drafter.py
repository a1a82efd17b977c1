"""What guesses the tokens that come next."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

# Longer drafts are seldom kept whole, and a step of so many tokens is hardly a decode step.
MOST_DRAFTED = 7


class Draft(NamedTuple):
    """Tokens that may come next."""

    tokens: Sequence[int]
    evidence: Sequence[int]
    """For each token, if those before it come true, which kind of evidence the drafter has for it:
    tokens of one kind are judged by each other."""


class Drafter(Protocol):
    """Guesses what comes next in one sequence, at no cost that counts."""

    def draft(self, tokens: Sequence[int]) -> Draft:
        """Return up to `MOST_DRAFTED` tokens that may follow the sequence so far.

        `tokens` is the same sequence at each call, with more at its end.
        """

    def end(self) -> None:
        """Hear that the sequence is through."""


class SureDraft(NamedTuple):
    """Tokens that may come next, and how sure the drafter is of each, if those before come true."""

    tokens: Sequence[int]
    sureness: Sequence[float] = ()
    """From 0 to 1; empty: the drafter does not know."""


class PaidDrafter(Protocol):
    """Guesses what comes next in several sequences at once, and takes its time."""

    def draft(
        self, histories: Mapping[int, Sequence[int]], most: Mapping[int, int], least: float
    ) -> Mapping[int, SureDraft]:
        """Return tokens that may follow, by slot: up to `most` each, often fewer than asked.

        `histories` are all tokens of the sequences by their slots. A drafter that knows how sure it
        is ends a draft whose tokens all come true with a chance below `least`.
        """


MakeDrafter = Callable[[], Drafter]

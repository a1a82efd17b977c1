"""Counts how often drafted tokens were right, by their groups (`Draft.evidence`).

Drafts are judged whether they are verified or not, because comparing a draft with the model's
output costs nothing. So it is noticed when speculation that does not pay now begins to pay.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.policy.speculation.drafter import Draft

# About the latest 20 tokens count, because answers alternate between quoting and writing.
_DECAY = 0.95


@dataclass(slots=True)
class _Rate:
    """The decayed share of drafted tokens that were right, given that all before them were."""

    hits: float = 0.0
    trials: float = 0.0

    def add(self, decay: float, *, is_hit: bool) -> None:
        self.hits = self.hits * decay + is_hit
        self.trials = self.trials * decay + 1

    def share(self, expected: float, weight: float) -> float:
        """Return the share; the prior `expected` counts as `weight` tokens."""
        return (self.hits + expected * weight) / (self.trials + weight)


@dataclass(slots=True)
class Acceptance:
    """How often drafted tokens of one drafter were right, by group of tokens.

    `Draft.evidence` has the groups.
    """

    decay: float = _DECAY
    """The factor of a token's weight for each newer token."""
    prior: float = 0.4
    """The rate of a group before any of its tokens has been judged."""
    prior_weight: float = 2.0
    """The weight of the prior, in tokens."""
    common_weight: float = 0.0
    """The weight, in tokens, of a prior that is the rate of all groups together; 0: each group's
    prior is `prior` instead. It should be large if groups are positions in a draft, which behave
    alike, and 0 if groups are lengths of matches."""
    _common: _Rate = field(default_factory=_Rate)
    _rates: defaultdict[int, _Rate] = field(default_factory=lambda: defaultdict(_Rate))

    def add(self, evidence: int, *, is_hit: bool) -> None:
        """Record whether a token of group `evidence` was right; all before it must be right."""
        self._common.add(self.decay, is_hit=is_hit)
        self._rates[evidence].add(self.decay, is_hit=is_hit)

    def chances(self, evidence: Sequence[int], estimates: Sequence[float] = ()) -> list[float]:
        """Return, for each token of a draft, the chance that it and all before it are right.

        `evidence` has the tokens' groups. `estimates` are the drafter's own chances, which count
        while few tokens of the same group have been judged.
        """
        expected, weight = self.prior, self.prior_weight
        if self.common_weight:
            expected, weight = self._common.share(expected, weight), self.common_weight
        chance, chances = 1.0, []
        for place, kind in enumerate(evidence):
            share = self._rates[kind].share(estimates[place] if estimates else expected, weight)
            chance *= share
            chances.append(chance)
        return chances


@dataclass(slots=True)
class OpenDraft:
    """A draft to be judged by the model's output."""

    draft: Draft = field(default_factory=lambda: Draft((), ()))
    length: int = 0
    """The length of the sequence before the draft, in tokens."""
    num_judged: int = 0
    is_wrong: bool = False

    @property
    def is_open(self) -> bool:
        """Whether tokens of the draft are still to be judged."""
        return not self.is_wrong and self.num_judged < len(self.draft.tokens)

    def judge(self, tokens: Sequence[int], acceptance: Acceptance) -> None:
        """Compare the draft with the sequence `tokens`; record in `acceptance` what was right."""
        draft = self.draft
        while self.is_open and self.length + self.num_judged < len(tokens):
            place = self.num_judged
            is_hit = draft.tokens[place] == tokens[self.length + place]
            acceptance.add(draft.evidence[place], is_hit=is_hit)
            self.is_wrong = not is_hit
            self.num_judged += is_hit

"""How often drafted tokens came true, by the evidence that there was for them.

Drafts are judged whether they are verified or not: a draft costs nothing to compare with what the
model writes anyway. So speculation that does not pay now is noticed when it would.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.policy.speculation.drafter import Draft

# The latest 20 tokens or so decide: answers change between quoting and writing.
_DECAY = 0.95


@dataclass(slots=True)
class _Rate:
    """A decayed share of drafted tokens that came true after all before them did."""

    hits: float = 0.0
    trials: float = 0.0

    def add(self, decay: float, *, is_hit: bool) -> None:
        self.hits = self.hits * decay + is_hit
        self.trials = self.trials * decay + 1


@dataclass(slots=True)
class Acceptance:
    """Rates of all drafts of one drafter."""

    decay: float = _DECAY
    """What a token counts for when one more has come."""
    prior: float = 0.4
    """What is expected before anything is known."""
    prior_weight: float = 2.0
    """As how many tokens that counts."""
    follows: bool = False
    """Whether a later token is expected to come true as often as the one before, where little is
    known of it: places in a draft do, kinds of matches do not."""
    _rates: defaultdict[int, _Rate] = field(default_factory=lambda: defaultdict(_Rate))

    def add(self, evidence: int, *, is_hit: bool) -> None:
        """Note whether a drafted token came, after those before it in its draft had come."""
        self._rates[evidence].add(self.decay, is_hit=is_hit)

    def chances(self, evidence: Sequence[int]) -> list[float]:
        """Return, for each token of a draft, how likely it and all before it come true."""
        chance, chances, share, weight = 1.0, [], self.prior, self.prior_weight
        for kind in evidence:
            rate, expected = self._rates[kind], share if self.follows else self.prior
            share = (rate.hits + expected * weight) / (rate.trials + weight)
            chance *= share
            chances.append(chance)
        return chances


@dataclass(slots=True)
class OpenDraft:
    """A draft that waits to be judged by what the model writes."""

    draft: Draft = field(default_factory=lambda: Draft((), ()))
    length: int = 0
    """Tokens of the sequence that the draft followed."""
    num_judged: int = 0

    def judge(self, tokens: Sequence[int], acceptance: Acceptance) -> bool:
        """Compare the draft with the tokens that came; tell whether more of it is to come."""
        draft = self.draft
        while self.num_judged < min(len(draft.tokens), len(tokens) - self.length):
            place = self.num_judged
            is_hit = draft.tokens[place] == tokens[self.length + place]
            acceptance.add(draft.evidence[place], is_hit=is_hit)
            if not is_hit:
                return False
            self.num_judged += 1
        return self.num_judged < len(draft.tokens)

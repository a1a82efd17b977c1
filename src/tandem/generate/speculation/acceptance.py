"""How often drafted tokens came true, by the evidence that there was for them.

Drafts are judged whether they are verified or not: a draft costs nothing to compare with what the
model writes anyway. So speculation that does not pay now is noticed when it would.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from tandem.generate.speculation.drafter import Draft

# The latest 20 tokens or so decide: answers change between quoting and writing.
_DECAY = 0.95
# What is expected before anything is known, and as how many tokens it counts.
_PRIOR, _PRIOR_WEIGHT = 0.4, 2.0


@dataclass(slots=True)
class _Rate:
    """A decayed share of drafted tokens that came true after all before them did."""

    hits: float = _PRIOR * _PRIOR_WEIGHT
    trials: float = _PRIOR_WEIGHT

    def add(self, *, is_hit: bool) -> None:
        self.hits = self.hits * _DECAY + is_hit
        self.trials = self.trials * _DECAY + 1


@dataclass(slots=True)
class Acceptance:
    """Rates of all drafts of one drafter."""

    _rates: defaultdict[int, _Rate] = field(default_factory=lambda: defaultdict(_Rate))

    def add(self, evidence: int, *, is_hit: bool) -> None:
        """Note whether a drafted token came, after those before it in its draft had come."""
        self._rates[evidence].add(is_hit=is_hit)

    def chances(self, draft: Draft) -> list[float]:
        """Return, for each token of a draft, how likely it and all before it come true."""
        chance, chances = 1.0, []
        for evidence in draft.evidence:
            rate = self._rates[evidence]
            chance *= rate.hits / rate.trials
            chances.append(chance)
        return chances

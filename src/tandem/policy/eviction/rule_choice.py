"""Which of several rules a layer's cache follows: the one whose ghost cache has had more hits.

A rule is a score per expert. For each rule a ghost cache holds what that rule would hold by now;
all see the same loads. A rule is followed until another one has had `MARGIN` hits more than it
since some moment, so it is never behind the best one by more. What comes on top is a refill of the
cache at each change. The first rule learns, so it may be the worse one at the start of a run only;
it is taken back sooner, but each time that it was left a little later.
"""

from collections.abc import Sequence

RULES = ("next-use", "lru", "decayed")
NEXT_USE, RECENCY, DECAYED = range(len(RULES))
MARGIN = 28  # hits, to leave a rule
BACK_MARGIN = 7  # to come back to the first one, times how often it was left; at most MARGIN


class GhostCache:
    """The experts of a layer that one rule would hold; it admits and evicts as `Admission` does."""

    def __init__(self, capacity: int) -> None:
        """Start empty."""
        self._capacity = capacity
        self._held: set[int] = set()

    def use(self, experts: Sequence[int], scores: Sequence[int]) -> int:
        """Return how many of the experts are held, then let the others in by their scores."""
        held = self._held
        misses = sorted((-scores[e], e) for e in experts if e not in held)
        hits = len(experts) - len(misses)
        if not misses:
            return hits
        free = self._capacity - len(held)
        held.update([expert for _, expert in misses[:free]])
        if len(misses) > free:
            leaving = sorted((scores[e], e) for e in held.difference(experts))
            for (newcomer, expert), (least, victim) in zip(misses[free:], leaving, strict=False):
                if -newcomer <= least:
                    break
                held.remove(victim)
                held.add(expert)
        return hits


class RuleChoice:
    """The choice of one layer. It needs the size of the layer's cache; until then it stays put."""

    def __init__(self, num_experts: int) -> None:
        """Follow the first rule."""
        self.followed = NEXT_USE
        self._num_experts = num_experts
        self._capacity = 0
        self._ghosts: list[GhostCache] = []
        self._leads = [0] * len(RULES)
        self._times_left = 0

    def resize(self, capacity: int) -> None:
        """Compare the rules in caches of this size from now on, if they can differ there."""
        if capacity == self._capacity:
            return
        self._capacity = capacity
        can_differ = 0 < capacity < self._num_experts
        self._ghosts = [GhostCache(capacity) for _ in RULES if can_differ]

    @property
    def is_open(self) -> bool:
        """Tell whether there is anything to choose."""
        return bool(self._ghosts)

    def use(
        self, experts: Sequence[int], scores: Sequence[Sequence[int]], *, is_prompt: bool
    ) -> None:
        """Take what the layer uses, with the scores by rule and expert, and choose again.

        The hits of a prompt do not count: they say little about the steps to come.
        """
        pairs = zip(self._ghosts, scores, strict=True)
        hits = [ghost.use(experts, by_expert) for ghost, by_expert in pairs]
        if is_prompt:
            return
        base = hits[self.followed]
        self._leads = [max(0, n + now - base) for n, now in zip(self._leads, hits, strict=True)]
        beyond = [n - wanted for n, wanted in zip(self._leads, self._margins(), strict=True)]
        if max(beyond) >= 0:
            self._times_left += self.followed == NEXT_USE
            self.followed = beyond.index(max(beyond))
            self._leads = [0] * len(RULES)

    def _margins(self) -> list[int]:
        """Return by rule how many hits it must be ahead to be followed."""
        back = min(MARGIN, BACK_MARGIN * max(1, self._times_left))
        return [back if rule == NEXT_USE else MARGIN for rule in range(len(RULES))]

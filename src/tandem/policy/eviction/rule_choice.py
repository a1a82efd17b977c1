"""Chooses each layer's rule of eviction: the rule whose ghost cache has had more hits.

A rule is a score per expert. For each rule a ghost cache holds the experts that this rule would
hold; all ghost caches see the same loads. All layers start with LRU. They leave it together once
another rule has more hits, over all layers, than chance explains; one layer alone would need ten
times longer to tell. From then on each layer follows its rule until another rule has had `MARGIN`
more hits since any earlier moment. So a layer is never further behind the best rule than `MARGIN`
hits, plus a refill of the cache at each change. The first rule, `next-use`, learns, so it may be
worse only at the start of a run. A layer returns to it after a smaller lead, which grows each time
that the layer leaves it.
"""

from collections.abc import Sequence

RULES = ("next-use", "lru", "decayed")
NEXT_USE, RECENCY, DECAYED = range(len(RULES))
MARGIN = 28  # hits by which another rule must lead
BACK_MARGIN = 7  # the same for returning to the first rule, per time it was left; at most MARGIN
# The lead in hits, in standard deviations, that is needed to leave LRU at the start.
START_DEVIATIONS = 7


class GhostCache:
    """The experts of a layer that one rule would hold; admits and evicts as `Admission` does."""

    def __init__(self, capacity: int) -> None:
        """Start empty."""
        self._capacity = capacity
        self._held: set[int] = set()

    def use(self, experts: Sequence[int], scores: Sequence[int]) -> int:
        """Return how many of the experts are held, and admit the others by their scores."""
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


class Start:
    """The rule that all layers start with: LRU, until another rule is surely better."""

    def __init__(self) -> None:
        """Start with LRU."""
        self.rule = RECENCY
        self._leads = [0] * len(RULES)
        self._squares = [0] * len(RULES)

    def weigh(self, hits: Sequence[int]) -> None:
        """Add one layer's hits in one step, by rule; change `rule` if another is surely better."""
        for rule, num_hits in enumerate(hits):
            more = num_hits - hits[RECENCY]
            self._leads[rule] += more
            self._squares[rule] += more * more
            if self._leads[rule] <= 0:  # losses while a rule still learned are no evidence
                self._leads[rule] = self._squares[rule] = 0
        lead = max(self._leads)
        best = self._leads.index(lead)
        if lead * lead > START_DEVIATIONS**2 * self._squares[best]:
            self.rule = best


class RuleChoice:
    """One layer's choice of a rule; always `next-use` if there are no ghost caches to compare."""

    def __init__(self, num_experts: int, start: Start) -> None:
        """Start without ghost caches; all layers share `start`, the rule that they start with."""
        self._start = start
        self._own: int | None = None  # this layer's rule, once it has changed it
        self._num_experts = num_experts
        self._capacity = 0
        self._ghosts: list[GhostCache] = []
        self._hits: list[int] | None = None  # by rule; not weighed yet
        self._leads = [0] * len(RULES)
        self._times_left = 0

    def resize(self, capacity: int) -> None:
        """Compare the rules in ghost caches of this size from now on.

        Without slots, or with a slot for every expert, the rules cannot differ and are not
        compared.
        """
        if capacity == self._capacity:
            return
        self._capacity = capacity
        can_differ = 0 < capacity < self._num_experts
        self._ghosts = [GhostCache(capacity) for _ in RULES if can_differ]

    @property
    def is_open(self) -> bool:
        """Whether there are ghost caches to compare."""
        return bool(self._ghosts)

    @property
    def followed(self) -> int:
        """The index in `RULES` of the rule that the layer follows."""
        if not self._ghosts:
            return NEXT_USE
        return self._start.rule if self._own is None else self._own

    def use(
        self, experts: Sequence[int], scores: Sequence[Sequence[int]], *, is_prompt: bool
    ) -> None:
        """Count the ghost caches' hits among the layer's experts; `scores` are by rule and expert.

        A prompt's hits do not count, because they say little about coming steps.
        """
        pairs = zip(self._ghosts, scores, strict=True)
        hits = [ghost.use(experts, by_expert) for ghost, by_expert in pairs]
        self._hits = None if is_prompt else hits

    def choose(self) -> int:
        """Weigh the hits of the last `use`; return the index of the rule to follow.

        Must be called once per step and layer, in the order of the layers, after the layer's `use`.
        """
        hits, self._hits = self._hits, None
        if hits is not None and self._start.rule == RECENCY:
            self._start.weigh(hits)
        elif hits is not None:
            self._weigh(hits)
        return self.followed

    def _weigh(self, hits: Sequence[int]) -> None:
        base = hits[self.followed]
        self._leads = [max(0, n + now - base) for n, now in zip(self._leads, hits, strict=True)]
        beyond = [n - margin for n, margin in zip(self._leads, self._margins(), strict=True)]
        if max(beyond) >= 0:
            self._times_left += self.followed == NEXT_USE
            self._own = beyond.index(max(beyond))
            self._leads = [0] * len(RULES)

    def _margins(self) -> list[int]:
        """Return, by rule, the lead in hits that a rule needs before a layer changes to it."""
        back = min(MARGIN, BACK_MARGIN * max(1, self._times_left))
        return [back if rule == NEXT_USE else MARGIN for rule in range(len(RULES))]

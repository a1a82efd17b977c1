"""Decides which processor computes each expert, which misses get slots, and which experts leave.

Deciders also choose which experts of coming layers are prefetched. This module is the reference, in
plain Python lists. For policies with a native form, engines use a native decider that makes the
same decisions, to the last bit (`tandem.experts.cache.native_decider`).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from tandem.policy.admission import Admission
from tandem.policy.ahead import Ahead, Coming
from tandem.policy.assignment.problem import LayerProblem, Split
from tandem.policy.assignment.rule import Rule
from tandem.policy.cost import CostTable
from tandem.policy.eviction.policy import Eviction
from tandem.policy.link_queue import UNLIMITED, LinkQueue
from tandem.policy.plan import LayerLoad
from tandem.policy.prefetch import Recurrence
from tandem.policy.residency import COPYING, EMPTY, NOWHERE, Residency


class LayerNow(NamedTuple):
    """A layer's load, and the state of each active expert: absent, being copied or ready."""

    load: LayerLoad
    keys: Sequence[int]  # of the active experts
    states: bytes  # one byte per key
    now: float
    places: bytes = b""
    """Where each active expert is, if the model runs from the disk (`tandem.policy.reads`). Empty:
    all are in memory."""


class Decider(Protocol):
    """Makes the decisions about a layer; the caller applies them."""

    def split(self, rule: Rule, layer: LayerNow, max_fetches: int) -> Split:
        """Return which processor computes each expert."""

    def entries(
        self, layer: LayerNow, split: Split, num_ahead: int, next_plan: float
    ) -> Iterable[tuple[int, int]]:
        """Yield (entering, leaving) keys for slots of the cache, best first.

        The leaving key is NOWHERE for a free slot. Until `next_plan`, when the next layer is
        planned, the link also carries the split's fetches and `num_ahead` prefetches. The caller
        must apply each pair before it requests the next pair.
        """

    def most_valued(self, layer: int, most: int) -> Sequence[int]:
        """Return up to `most` keys of a layer's absent experts, highest eviction score first."""

    def predicted(self, coming: Coming, chances: Recurrence) -> Iterable[tuple[int, int]]:
        """Yield (entering, leaving) keys for prefetches by prediction, best first.

        As for `entries`, the caller must apply each pair before it requests the next pair. A pair
        for a slot of the cache proper is yielded only if `chances.note_chance` returns True.
        """

    def known(self, load: LayerLoad, coming: Coming) -> tuple[int, Iterable[tuple[int, int]]]:
        """Return how many experts of a known load are worth a copy, and the copies to start now.

        Each copy is a pair of (entering, leaving) keys.
        """


class PlainDecider:
    """Makes the decisions in plain Python, for any combination of policies."""

    def __init__(
        self,
        costs: CostTable,
        residency: Residency,
        link: LinkQueue,
        eviction: Eviction,
        ahead: Ahead,
    ) -> None:
        """Store a planner's components; `ahead` chooses the prefetches."""
        self.costs, self.residency, self.link, self.eviction = costs, residency, link, eviction
        self.ahead = ahead
        self.predicted, self.known = ahead.predicted, ahead.known
        self._admission = Admission(residency, eviction)

    def split(self, rule: Rule, layer: LayerNow, max_fetches: int) -> Split:
        """Return the split that the rule chooses for the layer's assignment problem."""
        return rule.split(self.problem(rule, layer, max_fetches))

    def problem(self, rule: Rule, layer: LayerNow, max_fetches: int) -> LayerProblem:
        """Return the layer's assignment problem; `rule` decides which `cpu_first` applies."""
        load, keys, states, now, places = layer
        costs, tokens = self.costs, load.tokens
        costs.require(max(tokens))
        cpu_table, gpu_table = costs.cpu, costs.gpu
        wait = [0.0 if held else -1.0 for held in states]
        if COPYING in states:
            wait = [
                self.link.remaining_seconds(key, now) if state == COPYING else seconds
                for key, state, seconds in zip(keys, states, wait, strict=True)
            ]
        return LayerProblem(
            load.layer, load.experts, tokens,
            [cpu_table[n] for n in tokens], [gpu_table[n] for n in tokens], wait,
            self.eviction.scores(keys), costs.cpu_first if rule.launches else costs.planned_first,
            costs.link, self.link.busy_seconds(now),
            max_fetches, costs.cpu_slowdown, costs.link_slowdown, costs.copy_wake,
            costs.read, places,
        )  # fmt: skip

    def entries(
        self, layer: LayerNow, split: Split, num_ahead: int, next_plan: float
    ) -> Iterable[tuple[int, int]]:
        """Return the pairs that the eviction policy admits, within what its `background` allows."""
        in_use = frozenset(layer.keys)
        entering = self._entering(layer, in_use, split.fetch, num_ahead, next_plan)
        set_id = self.residency.set_of(layer.load.layer)
        return self._admission.pairs(set_id, entering, in_use)

    def most_valued(self, layer: int, most: int) -> Sequence[int]:
        """Return the keys with the highest eviction scores; equal scores are ordered by key."""
        slot_of, geometry = self.residency.slot_of, self.residency.geometry
        keys = range(geometry.key(layer, 0), geometry.key(layer + 1, 0))
        absent = [key for key in keys if slot_of[key] == NOWHERE]
        scores = dict(zip(absent, self.eviction.scores(absent), strict=True))
        return sorted(absent, key=lambda key: (-scores[key], key))[:most]

    def _entering(
        self,
        layer: LayerNow,
        in_use: frozenset[int],
        fetch: Sequence[int],
        num_ahead: int,
        next_plan: float,
    ) -> Sequence[int]:
        residency, eviction = self.residency, self.eviction
        misses = [key for key, held in zip(layer.keys, layer.states, strict=True) if held == EMPTY]
        staged = [key for key in residency.members[residency.staging] if key in in_use]
        room = UNLIMITED
        if eviction.background != "always":
            if not misses and not staged:
                return ()
            is_idle = eviction.background == "idle"
            idle = self.link.idle_copies(layer.now, next_plan) if is_idle else 0
            room = idle - len(fetch) - num_ahead
            if room <= 0 and not fetch and not staged:
                return ()
        kept = []
        slot_of, first = residency.slot_of, residency.geometry.key(layer.load.layer, 0)
        for key in eviction.candidates(layer.load.layer, [*misses, *staged], slot_of):
            if slot_of[key] == NOWHERE and key - first not in fetch:
                if room <= 0:
                    continue
                room -= 1
            kept.append(key)
        return kept

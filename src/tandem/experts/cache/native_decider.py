"""The decider in native code: the decisions of `tandem.policy.decider`, bit for bit, but faster.

Captured steps and host slots use the same native code (csrc/decider).
"""

from collections.abc import Iterable, Sequence

from tandem.experts.cache.native_predictor import NativePredictor
from tandem.kernels import _native
from tandem.policy.ahead import Coming
from tandem.policy.assignment.problem import Split
from tandem.policy.assignment.rule import Rule
from tandem.policy.cost import CostTable
from tandem.policy.decider import LayerNow, PlainDecider
from tandem.policy.eviction import next_use
from tandem.policy.link_queue import UNLIMITED
from tandem.policy.plan import LayerLoad
from tandem.policy.prefetch import Pays, Recurrence
from tandem.policy.residency import COPYING, NOWHERE, READY


def native_costs(costs: CostTable, *, is_planned: bool = False) -> _native.Costs:
    """Return native costs, for planned steps if `is_planned`, else for steps in one graph."""
    first = costs.planned_first if is_planned else costs.cpu_first
    return _native.Costs(
        costs.cpu, costs.gpu, first, costs.link, costs.cpu_slowdown,
        costs.link_slowdown, costs.copy_wake, costs.read,
    )  # fmt: skip


class NativeDecider:
    """Makes decisions natively, for the eviction policy `next-use` and one set per layer."""

    def __init__(self, plain: PlainDecider, eviction: next_use.NextUse) -> None:
        """Share the state of `plain`, and pass on to it the decisions that have no native form."""
        self._plain, self._eviction = plain, eviction
        self._residency, self._link = plain.residency, plain.link
        self._take_costs()
        prediction, prefetch = plain.ahead.prediction, plain.ahead.prefetch
        self._price, self._most_ahead = plain.ahead.price, prefetch.count
        self._predictor: _native.RegressionPredictor | None = None
        if isinstance(prediction, NativePredictor) and isinstance(prefetch, Pays):
            self._predictor = prediction.native

    def _take_costs(self) -> None:
        costs = self._plain.costs
        self._costs, self._planned_costs = native_costs(costs), native_costs(costs, is_planned=True)
        self._most_tokens = len(costs.cpu) - 1

    def split(self, rule: Rule, layer: LayerNow, max_fetches: int) -> Split:
        """Return which processor computes each active expert, as the assignment `rule` chooses."""
        if rule.native is None:
            return self._plain.split(rule, layer, max_fetches)
        load, keys, states, now, places = layer
        self._require(load)
        coming: list[float] = []
        if COPYING in states:
            coming = [
                self._link.remaining_seconds(key, now) if state == COPYING else 0.0
                for key, state in zip(keys, states, strict=True)
            ]
        return Split(
            *_native.split_layer(
                self._costs if rule.launches else self._planned_costs, rule.native,
                rule.never_worse_than_cpu, max_fetches, load.experts, load.tokens, states, coming,
                self._eviction.values(load.layer),
                self._link.busy_seconds(now), places,
            )
        )  # fmt: skip

    def entries(
        self, layer: LayerNow, split: Split, num_ahead: int, next_plan: float
    ) -> Iterable[tuple[int, int]]:
        """Return the experts that enter a layer's slots as (entering, leaving) keys, best first.

        The leaving key is NOWHERE if the entering expert gets a free slot.
        """
        residency, (load, keys, states, now, _) = self._residency, layer
        staged = residency.members[residency.staging]
        if not staged and states.count(READY) == len(states):
            return ()
        first, set_id = residency.geometry.key(load.layer, 0), residency.set_of(load.layer)
        return _native.layer_entries(
            load.experts, self._states(load.layer), self._eviction.values(load.layer), first,
            residency.members[set_id],
            [key for key in staged if key in keys], len(residency.free[set_id]), split.fetch,
            self._link.idle_copies(now, next_plan) - len(split.fetch) - num_ahead,
        )  # fmt: skip

    def most_valued(self, layer: int, most: int) -> Sequence[int]:
        """Return up to `most` keys of a layer's absent experts, highest eviction value first."""
        first = self._residency.geometry.key(layer, 0)
        values = self._eviction.values(layer)
        return _native.most_valued(self._states(layer), values, first, most)

    def predicted(self, coming: Coming, chances: Recurrence) -> Iterable[tuple[int, int]]:
        """Return (entering, leaving) keys for prefetches of a later layer's predicted experts.

        A leaving key is NOWHERE for a free or staging slot.
        """
        if self._predictor is None:
            return self._plain.predicted(coming, chances)
        layer, begin, needed_at, in_graph, _ = coming
        if begin >= needed_at:
            return ()
        residency, first = self._residency, self._residency.geometry.key(layer, 0)
        states, set_id = self._states(layer), residency.set_of(layer)
        room = len(residency.free[residency.staging]) if in_graph else residency.capacity[set_id]
        experts = _native.expected_ahead(
            self._predictor, self._costs, self._most_ahead, self._price, layer, states,
            self._late(first) if in_graph else (), begin, needed_at, room, in_graph,
        )  # fmt: skip
        if in_graph or not experts:
            return [(first + expert, NOWHERE) for expert in experts]
        pairs, chances.level = _native.over_residents(
            self._predictor, self._costs, self._price, layer, states, self._eviction.values(layer),
            first, residency.members[set_id], len(residency.free[set_id]), experts, chances.level,
        )  # fmt: skip
        return pairs

    def known(self, load: LayerLoad, coming: Coming) -> tuple[int, Iterable[tuple[int, int]]]:
        """Return how many experts of a known load are worth a copy, and the copies to start now.

        Each copy is a pair of (entering, leaving) keys; the leaving key is NOWHERE for a free or
        staging slot.
        """
        self._require(load)
        residency, layer = self._residency, load.layer
        first, states = residency.geometry.key(layer, 0), self._states(layer)
        is_staged = coming.in_graph or residency.capacity[residency.staging] > 0
        room = len(residency.free[residency.staging]) if is_staged else UNLIMITED
        num_chosen, experts = _native.known_ahead(
            self._costs, self._price, load.experts, load.tokens, states, self._late(first),
            coming.begin, coming.needed_at, room, coming.in_graph,
        )  # fmt: skip
        if is_staged or not experts:
            return num_chosen, [(first + expert, NOWHERE) for expert in experts]
        set_id = residency.set_of(layer)
        pairs = _native.over_lowest(
            load.experts, states, self._eviction.values(layer), first, residency.members[set_id],
            len(residency.free[set_id]), experts,
        )  # fmt: skip
        return num_chosen, pairs

    def _require(self, load: LayerLoad) -> None:
        """Extend the cost tables, if necessary, to the largest token count of `load`."""
        if max(load.tokens) > self._most_tokens:
            costs = self._plain.costs
            costs.require(max(load.tokens))
            self._take_costs()

    def _late(self, first: int) -> list[int]:
        """Return a layer's experts that are being copied; `first` is the key of its expert 0."""
        end = first + self._residency.geometry.num_experts
        return [key - first for key in self._link.pending if first <= key < end]

    def _states(self, layer: int) -> bytearray:
        geometry = self._residency.geometry
        return self._residency.state[geometry.key(layer, 0) : geometry.key(layer + 1, 0)]

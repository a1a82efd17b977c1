"""The decider in native code: what `tandem.policy.decider` decides, to the last bit, much sooner.

It is the one that captured steps and host slots ask too (csrc/decider).
"""

from collections.abc import Iterable, Sequence

from tandem.kernels import _native
from tandem.policy.assignment.problem import Split
from tandem.policy.assignment.rule import Rule
from tandem.policy.cost import CostTable
from tandem.policy.decider import LayerNow, PlainDecider
from tandem.policy.eviction import next_use
from tandem.policy.residency import COPYING, READY


def native_costs(costs: CostTable, *, is_planned: bool = False) -> _native.Costs:
    """Return what things cost in steps that are one graph or planned, as the tables are now."""
    first = costs.planned_first if is_planned else costs.cpu_first
    return _native.Costs(
        costs.cpu, costs.gpu, first, costs.link, costs.cpu_slowdown,
        costs.link_slowdown, costs.copy_wake,
    )  # fmt: skip


class NativeDecider:
    """Decides with the eviction `successor` on one set of slots per layer."""

    def __init__(self, plain: PlainDecider, eviction: next_use.NextUse) -> None:
        """Read what the plain one reads, and ask it about assignments without a native form."""
        self._plain, self._eviction = plain, eviction
        self._residency, self._link = plain.residency, plain.link
        self._take_costs()

    def _take_costs(self) -> None:
        costs = self._plain.costs
        self._costs, self._planned_costs = native_costs(costs), native_costs(costs, is_planned=True)
        self._most_tokens = len(costs.cpu) - 1

    def split(self, rule: Rule, layer: LayerNow, max_fetches: int) -> Split:
        """Return who computes what."""
        if rule.native is None:
            return self._plain.split(rule, layer, max_fetches)
        load, keys, states, now = layer
        if max(load.tokens) > self._most_tokens:
            costs = self._plain.costs
            costs.require(max(load.tokens))
            self._take_costs()
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
                self._link.busy_seconds(now),
            )
        )  # fmt: skip

    def entries(
        self, layer: LayerNow, split: Split, num_ahead: int, next_plan: float
    ) -> Iterable[tuple[int, int]]:
        """Return who gets a slot, best first, and who leaves for it."""
        residency, (load, keys, states, now) = self._residency, layer
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
        """Return the keys of a layer's absent experts, the most valuable first, at most so many."""
        first = self._residency.geometry.key(layer, 0)
        values = self._eviction.values(layer)
        return _native.most_valued(self._states(layer), values, first, most)

    def _states(self, layer: int) -> bytearray:
        geometry = self._residency.geometry
        return self._residency.state[geometry.key(layer, 0) : geometry.key(layer + 1, 0)]

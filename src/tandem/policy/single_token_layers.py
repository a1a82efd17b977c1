"""Single-token layers: each active expert has one token, some are absent, none is being copied.

That is a decode step at batch 1, where planning takes the largest share of a layer's time. With
Tandem's own policies one native call decides everything about such a layer, and it decides what
`Planner` decides without it.
"""

from collections.abc import Callable

from tandem.policy.cost import CostTable
from tandem.policy.eviction.next_use import NextUse
from tandem.policy.plan import LayerLoad
from tandem.policy.residency import COPYING, Residency
from tandem.policy.tables import DecideSingleToken, SingleTokenDecision, SingleTokenTerms


class SingleTokenLayers:
    """Asks for decisions about single-token layers."""

    def __init__(
        self,
        make: Callable[[SingleTokenTerms], DecideSingleToken],
        costs: CostTable,
        residency: Residency,
        eviction: NextUse,
        *,
        max_fetches: int,
        never_worse_than_cpu: bool,
    ) -> None:
        """Look at one set of slots per layer, while nothing is staged."""
        assert residency.num_sets == residency.geometry.num_layers
        cpu = costs.cpu[1]
        self._decide = make(
            SingleTokenTerms(
                cpu, costs.gpu[1], costs.cpu_first, costs.link, costs.cpu_slowdown,
                costs.link_slowdown, max_fetches, never_worse_than_cpu,
            )
        )  # fmt: skip
        self._residency = residency
        self._eviction = eviction
        # By number of experts: added up, as the planner does. Forced routing may exceed top_k.
        self._all_on_cpu = [sum([cpu] * n) for n in range(residency.geometry.num_experts + 1)]

    def decision(
        self,
        load: LayerLoad,
        states: bytes,
        now: float,
        dense_seconds: float,
        link_busy_seconds: float,
    ) -> SingleTokenDecision | None:
        """Return what to do with a layer that has misses; None if it is not a single-token one.

        `states` are those of the active experts.
        """
        if len(load.routes) != 1 or max(load.tokens) > 1 or COPYING in states:
            return None
        layer, residency = load.layer, self._residency
        num_experts = residency.geometry.num_experts
        first, set_id = layer * num_experts, residency.set_of(layer)
        return self._decide(
            load.experts,
            residency.state[first : first + num_experts],
            self._eviction.values(layer),
            first,
            residency.members[set_id],
            len(residency.free[set_id]),
            self._all_on_cpu[len(states)],
            now,
            dense_seconds,
            link_busy_seconds,
        )

"""The cost of multi-token steps relative to one token, from the experts that recent tokens touched.

This gives a cost to sizes of steps that were never tried. Consecutive tokens share experts, and
resident experts cost little; both effects change along a text, and while the expert cache fills.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import pow

from tandem.policy.plan import LayerLoad
from tandem.policy.planner import Planner
from tandem.policy.residency import NOWHERE

StepShape = Callable[[int], float]
"""Returns the relative time of a step with this many tokens."""

# The largest step size that is modelled in detail; larger ones follow a power law.
_MOST_TOKENS = 8
# Layers that are observed. All are alike, and each takes some microseconds per step.
_MOST_LAYERS = 6
# Weight of a new step, once there are enough.
_SHARE = 1 / 24
# On real routing, a second token touches .57 to .71 times the bytes of the first; four touch 2.4 to
# 2.9 times.
_GROWTH = 0.72


def shape_of_bytes(dense_bytes: float, expert_bytes: float) -> StepShape:
    """Return the shape of steps whose time is proportional to the bytes read from one memory.

    A step reads `dense_bytes` once; `expert_bytes` are those of one token's experts.
    """

    def seconds(num_tokens: int) -> float:
        return dense_bytes + expert_bytes * pow(num_tokens, _GROWTH)

    return seconds


@dataclass(slots=True, weakref_slot=True)
class TouchedExperts:
    """The shape of steps in which the GPU computes resident experts and the CPU all others."""

    planner: Callable[[], Planner]
    """Returns the planner, which knows the resident experts and the costs."""
    _recent: dict[int, deque[Sequence[int]]] = field(default_factory=dict)
    _seconds: list[float] = field(default_factory=lambda: [0.0] * (_MOST_TOKENS + 1))
    _num_seen: int = 0

    def observe(self, load: LayerLoad) -> None:
        """Update the costs by the experts of a layer's latest tokens, including those of `load`."""
        num_layers = self.planner().geometry.num_layers
        if not load.routes or load.layer % max(1, num_layers // _MOST_LAYERS):
            return
        recent = self._recent.setdefault(load.layer, deque(maxlen=_MOST_TOKENS))
        recent.extend(load.routes[-_MOST_TOKENS:])
        if len(recent) < _MOST_TOKENS:
            return
        self._num_seen += 1
        share = max(_SHARE / _MOST_LAYERS, 1 / self._num_seen)
        counts: dict[int, int] = {}
        for num_tokens, route in enumerate(reversed(recent), 1):
            for expert in route:
                counts[expert] = counts.get(expert, 0) + 1
            found = self._layer_seconds(load.layer, counts, num_tokens)
            self._seconds[num_tokens] += share * (found - self._seconds[num_tokens])

    def __call__(self, num_tokens: int) -> float:
        """Return the mean seconds of one layer in a step of `num_tokens` tokens."""
        if not self._num_seen:  # assumes that no expert is resident
            planner = self.planner()
            experts = planner.geometry.top_k * pow(num_tokens, _GROWTH)
            return planner.costs.dense(num_tokens) + planner.costs.cpu[1] * experts
        known = self._seconds[min(num_tokens, _MOST_TOKENS)]
        return known * pow(max(num_tokens, _MOST_TOKENS) / _MOST_TOKENS, _GROWTH)

    def _layer_seconds(self, layer: int, counts: dict[int, int], num_tokens: int) -> float:
        planner = self.planner()
        costs, slot_of = planner.costs, planner.residency.slot_of
        first = layer * planner.geometry.num_experts
        on_gpu = on_cpu = 0.0
        for expert, tokens in counts.items():
            if slot_of[first + expert] == NOWHERE:
                on_cpu += costs.cpu[tokens]
            else:
                on_gpu += costs.gpu[tokens]
        on_cpu += costs.cpu_first if on_cpu else 0.0
        return costs.dense(num_tokens) + max(on_gpu, on_cpu)

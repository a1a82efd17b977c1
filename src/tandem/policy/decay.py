"""Exponentially decayed counts per expert, without touching the experts that did not occur.

Instead of multiplying every count by the decay at each tick, the increment grows by the decay's
inverse; all counts of a layer then share one factor, which does not change their order.
"""

from collections.abc import Sequence

_RESCALE_ABOVE = 1e100


class DecayedCounts:
    """Decayed sums for the experts of all layers; each layer has its own clock."""

    def __init__(self, num_layers: int, num_experts: int, decay: float) -> None:
        """Start with all counts at zero; `decay` in (0, 1] is applied at each tick."""
        self.num_experts = num_experts
        self.growth = 1.0 / decay
        self.raw = [0.0] * (num_layers * num_experts)  # true count = raw / unit of its layer
        self.unit = [1.0] * num_layers

    def tick(self, layer: int) -> None:
        """Age all counts of a layer by one step."""
        unit = self.unit[layer] * self.growth
        if unit > _RESCALE_ABOVE:
            first = layer * self.num_experts
            span = slice(first, first + self.num_experts)
            self.raw[span] = [count / unit for count in self.raw[span]]
            unit = 1.0
        self.unit[layer] = unit

    def add(self, layer: int, expert: int, amount: float) -> None:
        """Add `amount` to an expert's count; later ticks of the layer age it."""
        self.raw[layer * self.num_experts + expert] += amount * self.unit[layer]

    def of(self, keys: Sequence[int]) -> list[float]:
        """Return the decayed counts of the experts with these keys, of any layers."""
        raw, unit, num_experts = self.raw, self.unit, self.num_experts
        return [raw[key] / unit[key // num_experts] for key in keys]

"""Lower bounds for a step's time, and the misses of LRU: functions of numbers alone."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a step's parts."""

    dense_seconds: float
    """A step's time without experts."""
    expert_seconds: float
    """Time of one expert that is in memory."""
    expert_bytes: int
    disk_rate: float
    """Bytes per second."""


def step_bound(absent: Sequence[int], chosen: Sequence[int], costs: Costs) -> float:
    """Return the least seconds of a decode step, from absent and chosen experts by layer.

    A layer's choice is known when the layer above is done, so its reads overlap only with its own
    residents' computation.
    """
    layers = (
        max(a * costs.expert_bytes / costs.disk_rate, (c - a) * costs.expert_seconds)
        for a, c in zip(absent, chosen, strict=True)
    )
    return costs.dense_seconds + sum(layers)


class LruSlots:
    """The experts of one layer in a number of slots; the least recently used one is evicted."""

    def __init__(self, num_slots: int) -> None:
        """Start empty."""
        self._num_slots = num_slots
        self._held: OrderedDict[int, None] = OrderedDict()

    def use(self, experts: Iterable[int]) -> int:
        """Use a token's experts; return how many were absent."""
        experts = list(experts)
        absent = sum(expert not in self._held for expert in experts)
        for expert in experts:
            self._held[expert] = None
            self._held.move_to_end(expert)
        while len(self._held) > self._num_slots:
            self._held.popitem(last=False)
        return absent

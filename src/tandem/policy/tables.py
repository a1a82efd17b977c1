"""The interface of the tables in which the eviction learns: in pure Python, or faster native code.

The engine gives the planner native tables, which must give the same answers to the last bit.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from tandem.policy.plan import Geometry, LayerLoad


class NextUseTable(Protocol):
    """What `eviction.next_use` learns about one layer."""

    def note(
        self, load: LayerLoad, divisor: int, experts: Sequence[int], above: Sequence[int]
    ) -> None:
        """Record the experts that the layer uses in a step.

        The load's token counts are divided by `divisor`; `experts` are in use now in this layer,
        and `above` in the layer above.
        """

    def learn(self) -> None:
        """Process the last `note`: correct the table by the error of an earlier prediction.

        Does nothing if the last `note` is already processed.
        """

    def values(self) -> memoryview:
        """Return the scores by expert, 32 bits each; they stay the same until the next note."""

    def forget_values(self) -> None:
        """Drop cached scores, because native code has changed the table."""

    def resize(self, capacity: int) -> None:
        """Compare the rules of `eviction.rule_choice` in a cache of `capacity` slots; 0: do not."""

    def followed(self) -> int:
        """Return the number of the rule by which `values` scores."""


class LearnsInTables:
    """Base of a policy whose constructor takes `tables`, perhaps native ones."""

    __slots__ = ()


class Tables(Protocol):
    """Factories of the tables in which the eviction learns."""

    @property
    def next_use(self) -> Callable[[Geometry], Sequence[NextUseTable]]:
        """The factory of `eviction.next_use`'s tables, which returns one table per layer."""

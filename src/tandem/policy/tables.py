"""The interface of the tables in which the eviction learns: pure ones, and faster native ones.

The engine gives the planner native tables; their answers are the same to the last bit.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from tandem.policy.plan import Geometry, LayerLoad


class NextUseTable(Protocol):
    """What `eviction.next_use` learns about one layer."""

    def note(
        self, load: LayerLoad, divisor: int, experts: Sequence[int], above: Sequence[int]
    ) -> None:
        """Record what the layer uses in a step.

        `divisor` scales the load's token counts; `experts` are in use now in this layer and `above`
        in the one above.
        """

    def learn(self) -> None:
        """Learn from the prediction made some steps before the last note; no-op if that is done."""

    def values(self) -> memoryview:
        """Return the scores by expert, 32 bits each; they stay the same until the next note."""

    def forget_values(self) -> None:
        """Drop cached scores, because native code has changed the table."""

    def resize(self, capacity: int) -> None:
        """Choose among the rules of `eviction.rule_choice` for a cache of this size; 0: do not."""

    def followed(self) -> int:
        """Return the rule of `values`."""


class LearnsInTables:
    """Base of a policy whose constructor takes `tables`, perhaps native ones."""

    __slots__ = ()


class Tables(Protocol):
    """Factories of tables."""

    @property
    def next_use(self) -> Callable[[Geometry], Sequence[NextUseTable]]:
        """The factory of `eviction.next_use`'s tables, by layer; None: pure ones."""

"""The tables of rows that the eviction learns in, as a seam: slow and pure ones, and faster ones.

The engine gives the planner native tables; they answer the same to the last bit.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from tandem.policy.plan import Geometry, LayerLoad


class NextUseTable(Protocol):
    """What `eviction.next_use` learns of one layer."""

    def note(
        self, load: LayerLoad, divisor: int, experts: Sequence[int], above: Sequence[int]
    ) -> None:
        """Take what the layer uses at a step.

        `divisor` scales the load's token counts; `experts` are in use now in this layer and `above`
        in the one above.
        """

    def learn(self) -> None:
        """Learn from what was predicted some steps before the last note; no-op if that is done."""

    def values(self) -> memoryview:
        """Return the scores by expert, 32 bits each; the same until the next note."""

    def forget_values(self) -> None:
        """Read the scores again: the table has been noted behind this object."""

    def resize(self, capacity: int) -> None:
        """Choose among the rules of `eviction.rule_choice` for a cache of this size; 0: do not."""

    def followed(self) -> int:
        """Return the rule that `values` are of."""


class LearnsInTables:
    """Base of a policy whose constructor takes `tables`, which may be native, to learn in."""

    __slots__ = ()


class Tables(Protocol):
    """Makers of both kinds."""

    @property
    def next_use(self) -> Callable[[Geometry], Sequence[NextUseTable]]:
        """Return what makes those of `eviction.next_use`, by layer."""

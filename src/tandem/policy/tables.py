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
        """Record a layer's load in a step; `learn` processes it.

        Token counts of the load are divided by `divisor`. `experts` are the layer's experts in use
        now; for a prompt, those of its last token. `above` are the same for the layer above.
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
        """Compare the rules of `rule_choice` in a cache of `capacity` slots; if it is 0, do not."""

    def followed(self) -> int:
        """Return the index in `rule_choice.RULES` of the rule whose scores `values` returns."""


class LearnsInTables:
    """Base of eviction policies whose constructor takes `tables`, which may be native."""

    __slots__ = ()


class Tables(Protocol):
    """Factories of the tables in which the eviction learns."""

    @property
    def next_use(self) -> Callable[[Geometry], Sequence[NextUseTable]]:
        """A function that returns the tables of `eviction.next_use` for a model, one per layer."""

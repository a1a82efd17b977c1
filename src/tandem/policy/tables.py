"""The tables of rows that policies learn in, as seams: slow and pure here, faster ones elsewhere.

Whoever drives a planner live may give it other tables; they answer the same to the last bit.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from tandem.policy.plan import Geometry, LayerLoad


class SuccessorTable(Protocol):
    """What `eviction.successor` learns of one layer."""

    def note(
        self, load: LayerLoad, divisor: int, experts: Sequence[int], above: Sequence[int]
    ) -> None:
        """Take what the layer uses at a step.

        `divisor` scales the load's token counts; `experts` are in use now in this layer and `above`
        in the one above.
        """
        ...

    def learn(self) -> None:
        """Settle what was foreseen some steps before what was noted last; nothing if all is."""
        ...

    def worth(self, experts: Sequence[int]) -> list[float]:
        """Return what is foreseen for experts of the layer."""
        ...


class ForesightTables(Protocol):
    """What `prediction.foresight` learns of all layers."""

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """Find the rows of a step's tokens, which hold until the next one."""
        ...

    def scores(self, layer: int, above: Sequence[int], before: Sequence[int]) -> Sequence[int]:
        """Return by expert `lanes.ONE` times the expected tokens, plus `regression.SUM_OFFSET`."""
        ...

    def teach(self, load: LayerLoad, above: Sequence[int], before: Sequence[int]) -> None:
        """Move the rows that had a share in foreseeing a load by a part of the error."""
        ...


class Tables(NamedTuple):
    """Makers of both kinds."""

    successor: Callable[[Geometry, int], SuccessorTable]  # model, layer
    foresight: Callable[[Geometry], ForesightTables]

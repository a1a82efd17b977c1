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

    def values(self) -> memoryview:
        """Return by expert what keeping it is worth, 32 bits each; the same until the next note."""
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


class LoneTerms(NamedTuple):
    """What stays the same between decisions about lone layers; times in seconds."""

    cpu: float  # one expert, one token
    gpu: float
    cpu_first: float  # on top, if the CPU has any
    link: float  # one copy
    max_fetches: int
    never_worse_than_cpu: bool


class LoneDecision(NamedTuple):
    """Who computes the experts of a lone layer, and who gets a slot."""

    fetch: Sequence[int]  # absent experts that the device takes, in the order of their copies
    spill: Sequence[int]  # ready ones that the CPU takes
    gpu_seconds: float
    cpu_seconds: float
    admitted: Sequence[tuple[int, int]]  # keys of newcomer and victim; NOWHERE: a free slot


class DecideLone(Protocol):
    """Decides in one call what `Planner` decides with its policies; see `LoneLayers`."""

    def __call__(
        self,
        experts: Sequence[int],
        states: bytearray,
        worth: memoryview,
        first: int,
        members: Sequence[int],
        free_slots: int,
        all_on_cpu: float,
        now: float,
        dense: float,
        link_busy: float,
        /,
    ) -> LoneDecision:
        """Return the decision.

        `states` and `worth` are by expert; `members` are the keys with a slot, `first` the key of
        expert 0. The last four are seconds: all experts on the CPU, the time, the dense part of
        the next layer, and how long the link still works.
        """
        ...


class Tables(NamedTuple):
    """Makers of both kinds, and of decisions about lone layers, which may be missing."""

    successor: Callable[[Geometry, int], SuccessorTable]  # model, layer
    foresight: Callable[[Geometry], ForesightTables]
    lone: Callable[[LoneTerms], DecideLone] | None = None

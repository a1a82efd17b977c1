"""The tables of rows that policies learn in, as seams: slow and pure here, faster ones elsewhere.

The engine gives the planner native tables; they answer the same to the last bit.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

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


class PredictionTables(Protocol):
    """What `prediction.regression_predictor` learns of all layers."""

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """Find the rows of a step's tokens, which hold until the next one."""

    def scores(self, layer: int, above: Sequence[int], before: Sequence[int]) -> Sequence[int]:
        """Return by expert `lanes.ONE` times the expected tokens, plus `regression.SUM_OFFSET`."""

    def teach(self, load: LayerLoad, above: Sequence[int], before: Sequence[int]) -> None:
        """Move the rows that had a share in predicting a load by a part of the error."""


class SingleTokenTerms(NamedTuple):
    """What stays the same between decisions about single-token layers; times in seconds."""

    cpu: float  # one expert, one token
    gpu: float
    cpu_first: float  # on top, if the CPU has any
    link: float  # one copy
    cpu_slowdown: float  # factor on CPU seconds while the link is busy
    link_slowdown: float  # factor in `link`, which a CPU without experts would not cost
    max_fetches: int
    never_worse_than_cpu: bool


class SingleTokenDecision(NamedTuple):
    """Who computes the experts of a single-token layer, and which get a slot."""

    fetch: Sequence[int]  # absent experts that the device takes, in the order of their copies
    spill: Sequence[int]  # ready ones that the CPU takes
    gpu_seconds: float
    cpu_seconds: float
    admitted: Sequence[tuple[int, int]]  # keys of newcomer and victim; NOWHERE: a free slot


DecideSingleToken = Callable[
    [Sequence[int], bytearray, memoryview, int, Sequence[int], int, float, float, float, float],
    SingleTokenDecision,
]
"""Decides in one call what `Planner` decides with its policies; see `SingleTokenLayers`.

It takes the active experts, states and scores by expert, the key of expert 0, the keys with a slot,
the number of free slots, and seconds: all experts on the CPU, the time, the dense part of the next
layer, and how long the link still works.
"""


class LearnsInTables:
    """Base of a policy whose constructor takes `tables`, which may be native, to learn in."""

    __slots__ = ()


class Tables(NamedTuple):
    """Makers of both kinds, and of decisions about single-token layers, which may be missing."""

    next_use: Callable[[Geometry], Sequence[NextUseTable]]  # by layer
    prediction: Callable[[Geometry], PredictionTables]
    single_token: Callable[[SingleTokenTerms], DecideSingleToken] | None = None

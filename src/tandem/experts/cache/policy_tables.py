"""The policies' tables in native code, for planning live: the same answers, much sooner."""

from collections.abc import Sequence
from functools import partial

from tandem.kernels import _native
from tandem.policy.eviction import successor
from tandem.policy.lanes import ONE
from tandem.policy.plan import Geometry, LayerLoad
from tandem.policy.prediction import foresight
from tandem.policy.tables import DecideLone, LoneDecision, LoneTerms, Tables


class _SuccessorTable:
    """See `tandem.policy.tables.SuccessorTable`."""

    def __init__(self, geometry: Geometry, layer: int) -> None:
        sources = 2 if layer else 1
        share = geometry.top_k / geometry.num_experts
        native = _native.SuccessorTable(
            geometry.num_experts,
            round(ONE * (successor.prior_of(geometry) / (geometry.top_k * sources))),
            int(ONE * share),
            successor.losses(),
            successor.RATE,
            successor.FAST_SHIFT,
            successor.SLOW_SHIFT,
            successor.FORESEEN_SHIFT,
            successor.MAX_TOKENS,
        )
        self._note, self.learn, self._read = native.note, native.learn, native.values
        self._values: memoryview | None = None  # since the last note

    def note(
        self, load: LayerLoad, divisor: int, experts: Sequence[int], above: Sequence[int]
    ) -> None:
        self._values = None
        self._note(load.experts, load.tokens, divisor, experts, above)

    def values(self) -> memoryview:
        if self._values is None:
            self._values = memoryview(self._read()).cast("I")
        return self._values


class _ForesightTables:
    """See `tandem.policy.tables.ForesightTables`."""

    def __init__(self, geometry: Geometry) -> None:
        native = _native.ForesightTables(
            geometry.num_layers,
            geometry.num_experts,
            round(ONE * foresight.prior_of(geometry)),
            foresight.BUCKETS,
            foresight.RATE,
            foresight.TOKEN_RATE,
        )
        self._teach, self.begin_step, self._scores = native.teach, native.begin_step, native.scores

    def scores(self, layer: int, above: Sequence[int], before: Sequence[int]) -> memoryview:
        return memoryview(self._scores(layer, above, before)).cast("I")

    def teach(self, load: LayerLoad, above: Sequence[int], before: Sequence[int]) -> None:
        self._teach(load.layer, load.experts, load.tokens, above, before)


def _decide_lone(terms: LoneTerms) -> DecideLone:
    native = partial(_native.decide_lone_layer, _native.LoneTerms(*terms))
    return lambda *layer: LoneDecision(*native(*layer))


NATIVE_TABLES = Tables(_SuccessorTable, _ForesightTables, _decide_lone)

"""The policies' tables in native code, for planning live: the same answers, much sooner."""

from collections.abc import Sequence

from tandem.kernels import _native
from tandem.policy.eviction import successor
from tandem.policy.lanes import ONE
from tandem.policy.plan import Geometry, LayerLoad
from tandem.policy.prediction import foresight
from tandem.policy.tables import Tables


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
        self._note, self.learn, self.worth = native.note, native.learn, native.worth

    def note(
        self, load: LayerLoad, divisor: int, experts: Sequence[int], above: Sequence[int]
    ) -> None:
        self._note(load.experts, load.tokens, divisor, experts, above)


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
        self._teach, self.begin_step, self.scores = native.teach, native.begin_step, native.scores

    def teach(self, load: LayerLoad, above: Sequence[int], before: Sequence[int]) -> None:
        self._teach(load.layer, load.experts, load.tokens, above, before)


NATIVE_TABLES = Tables(_SuccessorTable, _ForesightTables)

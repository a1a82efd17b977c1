"""Native forms of the policies' tables, for live planning: the same results, but faster."""

from collections.abc import Callable, Sequence
from functools import partial

from tandem.core.registry import Registry
from tandem.experts.cache.native_decider import NativeDecider, native_costs
from tandem.experts.cache.native_predictor import NativePredictor
from tandem.kernels import _native
from tandem.policy.decider import PlainDecider
from tandem.policy.eviction import EVICTIONS, Eviction, next_use, rule_choice
from tandem.policy.lanes import ONE
from tandem.policy.plan import Geometry, LayerLoad
from tandem.policy.planner import Planner
from tandem.policy.settings import Native, with_tables


class _NextUseTable:
    """One layer's native table; implements `tandem.policy.tables.NextUseTable`."""

    def __init__(
        self, geometry: Geometry, layer: int, start: _native.RuleStart, span: next_use.Span
    ) -> None:
        sources = 2 if layer else 1
        share = geometry.top_k / geometry.num_experts
        native = _native.NextUseTable(
            geometry.num_experts,
            round(ONE * (next_use.prior_of(geometry, span) / (geometry.top_k * sources))),
            int(ONE * share),
            next_use.losses(span),
            next_use.RATE,
            (next_use.FAST_SHIFT, next_use.SLOW_SHIFT, next_use.STEADY_SHIFT),
            next_use.PREDICTED_SHIFT,
            next_use.MAX_TOKENS,
            (rule_choice.MARGIN, rule_choice.BACK_MARGIN),
            start,
        )
        self.native = native
        self._note, self.learn, self._read = native.note, native.learn, native.values
        self.resize, self.followed = native.resize, native.followed
        self._values: memoryview | None = None  # valid until the next note

    def note(
        self, load: LayerLoad, divisor: int, experts: Sequence[int], above: Sequence[int]
    ) -> None:
        self._values = None
        self._note(load.experts, load.tokens, divisor, experts, above)

    def forget_values(self) -> None:
        self._values = None

    def values(self) -> memoryview:
        if self._values is None:
            self._values = memoryview(self._read()).cast("I")
        return self._values


def _next_use_tables(
    geometry: Geometry, span: next_use.Span = next_use.USUAL_SPAN
) -> list[_NextUseTable]:
    start = _native.RuleStart(rule_choice.START_DEVIATIONS)
    return [_NextUseTable(geometry, layer, start, span) for layer in range(geometry.num_layers)]


def _native_decider(plain: PlainDecider) -> NativeDecider | None:
    """Return the native decider for `plain`'s policies; None if they have no native form."""
    eviction, residency = plain.eviction, plain.residency
    is_by_layer = residency.num_sets == residency.geometry.num_layers
    if not is_by_layer or not isinstance(eviction, next_use.NextUse):
        return None
    return NativeDecider(plain, eviction) if _native_tables(eviction) else None


def _native_tables(eviction: next_use.NextUse) -> list[_native.NextUseTable]:
    """Return the native table of each layer; an empty list if the tables are not native."""
    return [table.native for table in eviction.tables if isinstance(table, _NextUseTable)]


def host_slot_tables(geometry: Geometry, num_slots: int) -> list[_native.NextUseTable]:
    """Return, by layer, the `next-use` tables for `num_slots` host slots per layer."""
    span = next_use.span_for(num_slots, geometry.top_k)
    return [table.native for table in _next_use_tables(geometry, span)]


# The hints that captured steps take: those of the next router, run ahead with the residual.
GRAPH_HINTS = "residual"
NATIVE_TABLES = Native(_next_use_tables, NativePredictor, _native_decider)


def host_slot_eviction(
    name: str, evictions: Registry[Eviction] = EVICTIONS
) -> Callable[[Geometry, int], Eviction]:
    """Return a factory of eviction policies that decide as native code does for host slots.

    The factory takes the model's geometry and the number of host slots per layer.
    """
    make = evictions.factory(name)

    def make_for(geometry: Geometry, num_slots: int) -> Eviction:
        span = next_use.span_for(num_slots, geometry.top_k)
        tables = NATIVE_TABLES._replace(next_use=partial(_next_use_tables, span=span))
        return with_tables(make, tables)(geometry)

    return make_for


def native_step_policy(planner: Planner) -> _native.StepPolicy | None:
    """Return the native policy that decides in captured steps, in the planner's present state.

    The policy decides as the planner does for steps in one graph, and updates the same tables: the
    eviction's, and the prediction's if steps in one graph prefetch. Returns None for an eviction
    without native tables, for slots that layers share, and if plans stage predicted experts too.
    """
    eviction, residency = planner.eviction, planner.residency
    if not isinstance(eviction, next_use.NextUse) or residency.num_sets == 1:
        return None
    if planner.stages_predictions:
        return None
    if not (tables := _native_tables(eviction)):
        return None
    predictor, factor = _graph_predictor(planner)
    return _native.StepPolicy(
        native_costs(planner.costs), planner.max_graph_fetches, planner.ahead.most,
        planner.ahead.copy_price_seconds, tables, predictor, factor, *resident_lists(planner),
    )  # fmt: skip


def _graph_predictor(planner: Planner) -> tuple[_native.RegressionPredictor | None, int]:
    """Return captured steps' predictor (None: they predict nothing) and its hints' place value."""
    prediction = planner.prediction
    if not planner.predicting_sizes or not isinstance(prediction, NativePredictor):
        return None, 1
    factor = prediction.sources.factor(GRAPH_HINTS)
    assert factor is not None
    return prediction.native, factor


def resident_lists(
    planner: Planner,
) -> tuple[bytes, list[int], list[list[int]], list[list[int]], list[int], list[int], list[int]]:
    """Free the slots of ready staged experts; return the residency for the native policy.

    The result: the state and the slot by key; by layer, the experts with slots and the free slots;
    the ring's slots; the keys of staged experts, whose copies have not ended; the free staging
    slots.
    """
    residency, experts = planner.residency, planner.geometry.num_experts
    residency.release_passed(planner.geometry.num_layers, ())
    *sets, ahead = residency.members
    *free, free_ahead = residency.free
    members = [[key % experts for key in keys] for keys in sets]
    ring = planner.ring.held_slots()
    return bytes(residency.state), residency.slot_of, members, free, ring, ahead, free_ahead

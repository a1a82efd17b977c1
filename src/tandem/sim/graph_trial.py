"""A trial of steps in one graph: for which numbers of rows fetches and copies ahead pay.

Steps of typical routing on the virtual clock, with a machine's costs, from a cache of the hottest
experts: by the rule that leaves every miss to the CPU, and by the one that fetches; then by the
better one without and with copies ahead of the next layer, from predictions as good as they usually
are. A loaded model, `tandem plan` and `tandem simulate` ask here, so equal costs and slots are one
answer.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from tandem.policy.cost import HardwareProfile, ShapeCosts
from tandem.policy.plan import Geometry, LayerLoad
from tandem.policy.prediction.policy import Forecast, Prediction
from tandem.policy.settings import FETCHING_RULE, GRAPH_RULE, PlannerSettings, Policies
from tandem.policy.step_path import GRAPH_ROWS
from tandem.policy.tables import Tables
from tandem.sim.replay import ReplaySettings, replay
from tandem.sim.start import SIMULATED_STARTS
from tandem.sim.typical_routing import typical_routing
from tandem.trace import RoutingTrace

# A second launch in every layer must bring so much: routing differs from what is typical.
LEAST_GAIN = 1.02
_STEPS = 24
_HEAT_SEQUENCES = 4
# Of the experts that `foresight` names, so many in a hundred come: 74 and 78 of gpt-oss-20b's and
# DeepSeek-V2-Lite's (docs/policies.md).
_RIGHT_OF_FOUR = 3


def settled(
    settings: PlannerSettings,
    profile: HardwareProfile,
    shape: ShapeCosts,
    geometry: Geometry,
    num_slots: int,
    *,
    tables: Tables | None = None,
) -> PlannerSettings:
    """Return settings whose steps in one graph fetch where that pays, if no rule is asked for.

    They copy predicted experts ahead if that is asked for, and where it pays in slots that are set
    aside anyway.
    `shape` has the graph's host costs in it; where an older profile says nothing of a second
    launch, nothing is fetched. Policies learn in `tables`, which changes no answer.
    """
    num_experts = geometry.num_layers * geometry.num_experts
    if num_slots >= num_experts and not settings.copies_prompts:
        return settings  # no slot is taken from experts that are all there
    if not 0 < num_slots < num_experts:
        return settings.with_predictions(())
    tries_rules = settings.assignment is None and shape.second_launch_seconds > 0
    if not tries_rules and not settings.may_predict:
        return settings.with_predictions(())
    trial = _Trial(settings, profile, shape, geometry, num_slots, tables)
    if tries_rules:
        fetching = tuple(rows for rows in GRAPH_ROWS if trial.fetches_pay(rows))
        settings = dataclasses.replace(settings, fetching_rows=fetching)
    predicting: tuple[int, ...] = ()
    if settings.may_predict:
        rules = {rows: settings.rule(graph_tokens=rows) for rows in GRAPH_ROWS}
        predicting = tuple(rows for rows in GRAPH_ROWS if trial.copies_pay(rows, rules[rows]))
    return settings.with_predictions(predicting)


def _trial_routing(geometry: Geometry) -> RoutingTrace:
    num_sequences = GRAPH_ROWS[-1] + _HEAT_SEQUENCES
    return typical_routing(geometry, num_sequences=num_sequences, num_tokens=_STEPS)


class _TypicalPrediction(Prediction):
    """Knows the trial's routing, and is as often wrong as `foresight` is on real routing."""

    def __init__(self, geometry: Geometry) -> None:
        """Draw the routing again: it is always the same."""
        self._geometry, self._routing = geometry, _trial_routing(geometry)
        self._step, self._rows = -1, 0

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """Go on to the sequences' next tokens."""
        self._step += 1

    def observe(self, load: LayerLoad) -> None:
        """Note how many sequences there are."""
        self._rows = sum(load.tokens) // self._geometry.top_k

    def predict(self, layer: int) -> Forecast:
        """Return what comes, but for each fourth choice."""
        num_experts, top_k = self._geometry.num_experts, self._geometry.top_k
        scores = [0.0] * num_experts
        for row in range(self._rows):
            for k, expert in enumerate(self._routing.experts[row * _STEPS + self._step, layer]):
                is_wrong = (self._step + layer + row * top_k + k) % 4 >= _RIGHT_OF_FOUR
                scores[(int(expert) + is_wrong) % num_experts] += _RIGHT_OF_FOUR / 4
        return Forecast(scores, 0.0, 1.0)


class _TrialSettings(PlannerSettings):
    """Settings that may have the trial's prediction."""

    __slots__ = ()
    policies: ClassVar[Policies] = PlannerSettings.policies._replace(
        predictions=PlannerSettings.policies.predictions.extended({"typical": _TypicalPrediction})
    )


class _Trial:
    """One model on one machine."""

    def __init__(
        self,
        settings: PlannerSettings,
        profile: HardwareProfile,
        shape: ShapeCosts,
        geometry: Geometry,
        num_slots: int,
        tables: Tables | None,
    ) -> None:
        self._run = ReplaySettings(
            settings=settings,
            profile=profile,
            shape=shape,
            num_slots=num_slots,
            prompt=0,
            compare_every=0,
            in_graph=True,
            tables=tables,
        )
        most = GRAPH_ROWS[-1]
        self._found: dict[tuple[int, str, bool], float] = {}  # seconds
        self._trace = _trial_routing(geometry)
        heat = self._trace.sequences(most, most + _HEAT_SEQUENCES)
        sizes = settings.set_sizes(geometry, num_slots)
        self._resident = SIMULATED_STARTS.factory("hottest")(geometry, sizes, heat)

    def fetches_pay(self, rows: int) -> bool:
        """Tell whether steps of so many rows are quicker by so much if they fetch."""
        fetching, plain = (self._seconds(rows, rule) for rule in (FETCHING_RULE, GRAPH_RULE))
        return plain > LEAST_GAIN * fetching

    def copies_pay(self, rows: int, rule: str) -> bool:
        """Tell whether they are quicker by so much by a rule if they copy ahead."""
        ahead, plain = (self._seconds(rows, rule, predicts=predicts) for predicts in (True, False))
        return plain > LEAST_GAIN * ahead

    def _seconds(self, rows: int, rule: str, *, predicts: bool = False) -> float:
        key = rows, rule, predicts
        if key not in self._found:
            self._found[key] = self._replayed(*key)
        return self._found[key]

    def _replayed(self, rows: int, rule: str, predicts: bool) -> float:
        asked = dataclasses.asdict(self._run.settings) | {"assignment": rule}
        if predicts:
            asked |= {"prediction": "typical", "predicting_rows": GRAPH_ROWS}
        run = dataclasses.replace(self._run, settings=_TrialSettings(**asked), batch=rows)
        routing = self._trace.sequences(0, rows)
        return replay(routing, run, resident=self._resident).decode_seconds

"""A trial of steps in one graph: at which sizes fetches and prefetches pay.

Steps of typical routing run on the virtual clock, with a machine's costs, from a cache of the
hottest experts. First the trial compares the rule that leaves every miss to the CPU with the rule
that fetches. Then it compares steps of the better rule without and with prefetches for the next
layer, from predictions of usual quality; and, if routers can be run ahead, from hints of usual
quality. With memory over a disk only the rules are tried, because a prefetch may wait for its
read, and later copies wait for that copy. A loaded model, `tandem plan` and `tandem simulate` all
use this trial, so equal costs and slots give equal settings.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from tandem.policy.cost import HardwareProfile, ShapeCosts
from tandem.policy.plan import Geometry, LayerLoad
from tandem.policy.prediction.policy import Forecast, Prediction
from tandem.policy.settings import FETCHING_RULE, GRAPH_RULE, Native, PlannerSettings, Policies
from tandem.policy.step_path import CAPTURE_SIZES
from tandem.sim.disk import HostShare
from tandem.sim.replay import ReplaySettings, replay
from tandem.sim.start import SIMULATED_STARTS
from tandem.sim.typical_routing import ONE_WRONG_IN, typical_routing
from tandem.trace import RoutingTrace

# Gain that a second launch in every layer must bring, because real routing differs from typical
# routing.
LEAST_GAIN = 1.02
_STEPS = 24
_HEAT_SEQUENCES = 4
# One in so many of the experts that `regression` names is wrong: 74 and 78 % come on gpt-oss-20b
# and DeepSeek-V2-Lite (docs/policies.md).
_REGRESSION_ONE_WRONG_IN = 4


def settled(
    settings: PlannerSettings,
    profile: HardwareProfile,
    shape: ShapeCosts,
    geometry: Geometry,
    num_slots: int,
    *,
    tables: Native | None = None,
    memory: HostShare | None = None,
) -> PlannerSettings:
    """Return the settings with the trial's choices for steps in one graph.

    Such steps fetch at the sizes at which that pays, unless `settings` request a rule. They also
    prefetch predicted experts, if requested or where that pays in slots that exist anyway; and
    they run routers ahead where that is allowed and pays. `shape` must include the graph's host
    costs. With an older profile that lacks the cost of a second launch, nothing is fetched; if it
    lacks the cost of running a router ahead, no router is run ahead. Policies learn in `tables`,
    which does not change the result.
    """
    num_experts = geometry.num_layers * geometry.num_experts
    if num_slots >= num_experts and not settings.copies_prompts:
        return settings  # all experts are resident, so none should lose a slot
    if not 0 < num_slots < num_experts:
        return settings.with_predictions(())
    tries_rules = settings.assignment is None and shape.second_launch_seconds > 0
    may_predict = settings.may_predict and memory is None
    tries_asking = settings.may_ask and shape.asking_seconds > 0 and memory is None
    if not tries_rules and not may_predict and not tries_asking:
        return settings.with_predictions(())
    trial = _Trial(settings, profile, shape, geometry, num_slots, tables, memory)
    if tries_rules:
        fetching = tuple(size for size in CAPTURE_SIZES if trial.fetches_pay(size))
        settings = dataclasses.replace(settings, fetching_sizes=fetching)
    predicting, asking = list[int](), list[int]()
    for size in CAPTURE_SIZES:
        rule = settings.rule(graph_tokens=size)
        if may_predict and trial.copies_pay(size, rule):
            predicting.append(size)
        if tries_asking and trial.asking_pays(size, rule):
            asking.append(size)
    return settings.with_predictions(tuple(predicting), tuple(asking))


def _trial_routing(geometry: Geometry) -> RoutingTrace:
    num_sequences = CAPTURE_SIZES[-1] + _HEAT_SEQUENCES
    return typical_routing(geometry, num_sequences=num_sequences, num_tokens=_STEPS)


class _TypicalPrediction(Prediction):
    """Predicts the trial's routing, wrong as often as predictions of real routing are."""

    def __init__(self, geometry: Geometry, *, one_wrong_in: int) -> None:
        """Draw the trial's routing again; one in `one_wrong_in` predicted experts will be wrong."""
        self._geometry, self._routing = geometry, _trial_routing(geometry)
        self._one_wrong_in = one_wrong_in
        self._step, self._num_sequences = -1, 0

    def begin_step(self, token_ids: Sequence[int]) -> None:
        """Advance to the sequences' next tokens."""
        self._step += 1

    def observe(self, load: LayerLoad) -> None:
        """Derive the step's number of sequences from a layer's token counts."""
        self._num_sequences = sum(load.tokens) // self._geometry.top_k

    def predict(self, layer: int) -> Forecast:
        """Return the layer's actual choices, with one in `one_wrong_in` experts replaced."""
        num_experts, top_k = self._geometry.num_experts, self._geometry.top_k
        one_in = self._one_wrong_in
        scores = [0.0] * num_experts
        for sequence in range(self._num_sequences):
            chosen = self._routing.experts[sequence * _STEPS + self._step, layer]
            for k, expert in enumerate(chosen):
                is_wrong = (self._step + layer + sequence * top_k + k) % one_in == one_in - 1
                scores[(int(expert) + is_wrong) % num_experts] += 1 - 1 / one_in
        return Forecast(scores, 0.0, 1.0)


_TYPICAL, _LOOK_AHEAD = "typical", "typical, looked ahead"


class _TrialSettings(PlannerSettings):
    """Planner settings that also know the trial's predictions by name."""

    __slots__ = ()
    policies: ClassVar[Policies] = PlannerSettings.policies._replace(
        predictions=PlannerSettings.policies.predictions.extended(
            {
                _TYPICAL: partial(_TypicalPrediction, one_wrong_in=_REGRESSION_ONE_WRONG_IN),
                _LOOK_AHEAD: partial(_TypicalPrediction, one_wrong_in=ONE_WRONG_IN),
            }
        )
    )


class _Trial:
    """Replays steps of typical routing for one model on one machine, and compares their times."""

    def __init__(
        self,
        settings: PlannerSettings,
        profile: HardwareProfile,
        shape: ShapeCosts,
        geometry: Geometry,
        num_slots: int,
        tables: Native | None,
        memory: HostShare | None,
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
            memory=memory,
        )
        most = CAPTURE_SIZES[-1]
        self._found: dict[tuple[int, str, str | None], float] = {}  # seconds
        self._trace = _trial_routing(geometry)
        self._heat = self._trace.sequences(most, most + _HEAT_SEQUENCES)

    def fetches_pay(self, size: int) -> bool:
        """Tell whether fetches speed up steps of this size by more than a factor `LEAST_GAIN`."""
        fetching, plain = (self._seconds(size, rule) for rule in (FETCHING_RULE, GRAPH_RULE))
        return plain > LEAST_GAIN * fetching

    def copies_pay(self, size: int, rule: str) -> bool:
        """Tell whether predicted prefetches speed up steps by more than a factor `LEAST_GAIN`."""
        ahead, plain = (self._seconds(size, rule, by) for by in (_TYPICAL, None))
        return plain > LEAST_GAIN * ahead

    def asking_pays(self, size: int, rule: str) -> bool:
        """Tell whether prefetches by hints speed up steps by more than a factor `LEAST_GAIN`.

        The comparison is with steps without prefetches. The trial's stand-in for `regression` would
        be no fair comparison: the stand-in is right as often as `regression`, but names more
        experts.
        """
        ahead, plain = (self._seconds(size, rule, by) for by in (_LOOK_AHEAD, None))
        return plain > LEAST_GAIN * ahead

    def _seconds(self, size: int, rule: str, prediction: str | None = None) -> float:
        key = size, rule, prediction
        if key not in self._found:
            self._found[key] = self._replayed(*key)
        return self._found[key]

    def _replayed(self, size: int, rule: str, prediction: str | None) -> float:
        fields = dataclasses.asdict(self._run.settings) | {"assignment": rule}
        if prediction is not None:
            fields |= {"prediction": prediction, "predicting_sizes": CAPTURE_SIZES}
        if prediction == _LOOK_AHEAD:
            fields |= {"asking_sizes": CAPTURE_SIZES}
        run = dataclasses.replace(self._run, settings=_TrialSettings(**fields), batch=size)
        geometry = self._trace.meta.geometry
        sizes = run.settings.set_sizes(geometry, run.num_slots)
        resident = SIMULATED_STARTS.factory("hottest")(geometry, sizes, self._heat)
        return replay(self._trace.sequences(0, size), run, resident=resident).decode_seconds

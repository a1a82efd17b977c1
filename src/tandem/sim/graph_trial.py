"""A trial of steps in one graph: for which numbers of rows it pays to fetch misses.

Steps of typical routing on the virtual clock, with a machine's costs, from a cache of the hottest
experts: by the rule that leaves every miss to the CPU, and by the one that fetches. A loaded model,
`tandem plan` and `tandem simulate` ask here, so equal costs and slots are one answer.
"""

import dataclasses

from tandem.policy.cost import HardwareProfile, ShapeCosts
from tandem.policy.plan import Geometry
from tandem.policy.settings import FETCHING_RULE, GRAPH_RULE, PlannerSettings
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

    They copy predicted experts ahead if that is asked for.
    `shape` has the graph's host costs in it; where an older profile says nothing of a second
    launch, nothing is fetched. Policies learn in `tables`, which changes no answer.
    """
    settings = settings.with_predictions(())
    num_experts = geometry.num_layers * geometry.num_experts
    is_known = shape.second_launch_seconds > 0
    if settings.assignment is not None or not is_known or not 0 < num_slots < num_experts:
        return settings
    trial = _Trial(settings, profile, shape, geometry, num_slots, tables)
    return dataclasses.replace(
        settings, fetching_rows=tuple(rows for rows in GRAPH_ROWS if trial.pays(rows))
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
        self._trace = typical_routing(
            geometry, num_sequences=most + _HEAT_SEQUENCES, num_tokens=_STEPS
        )
        heat = self._trace.sequences(most, most + _HEAT_SEQUENCES)
        sizes = settings.set_sizes(geometry, num_slots)
        self._resident = SIMULATED_STARTS.factory("hottest")(geometry, sizes, heat)

    def pays(self, rows: int) -> bool:
        """Tell whether steps of so many rows are quicker by so much if they fetch."""
        routing = self._trace.sequences(0, rows)
        fetching, plain = (self._seconds(routing, rows, n) for n in (FETCHING_RULE, GRAPH_RULE))
        return plain > LEAST_GAIN * fetching

    def _seconds(self, routing: RoutingTrace, rows: int, rule: str) -> float:
        settings = dataclasses.replace(self._run.settings, assignment=rule)
        run = dataclasses.replace(self._run, settings=settings, batch=rows)
        return replay(routing, run, resident=self._resident).decode_seconds

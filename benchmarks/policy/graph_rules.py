"""The gain of fetches in decode steps of one graph: `python -m benchmarks.policy.graph_rules`.

Replays real routing on a virtual clock of captured steps (`tests.sim.coordinator_clock`), with the
host costs of one graph, including the second launch and the wake-up of the copying thread. The
cache begins with random experts. The columns are ratios of speeds, by tokens per step:

- `balanced-in-graph` over `ready-on-gpu`;
- the rule that the trial chose on typical routing (`tandem.sim.graph_trial`) over `ready-on-gpu`;
- that rule with two experts prefetched per layer, predicted by `regression`, over the rule alone
  with equal slots; 1 if the trial did not choose prefetches;
- the same with look-ahead, of whose answers one in six, at random, is wrong;
- the forecast of `tandem plan` and `tandem simulate` over the replay of the rule;
- plans of `balanced`, which a graph cannot follow, charged with the graph's host costs.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from tests.sim.coordinator_clock import CoordinatorClock

from tandem.experts.cache.policy_tables import NATIVE_TABLES
from tandem.hardware.profiles import load_profile, shape_for
from tandem.policy.assignment import IN_GRAPH
from tandem.policy.cost import GRAPH, HardwareProfile, ShapeCosts
from tandem.policy.settings import FETCHING_RULE, GRAPH_RULE, PLANNED_RULE, PlannerSettings
from tandem.policy.step_path import CAPTURE_SIZES, capture_size
from tandem.sim.graph_trial import settled
from tandem.sim.replay import ReplaySettings, replay
from tandem.sim.start import SIMULATED_STARTS
from tandem.sim.timeline import Timeline
from tandem.sim.typical_routing import with_guesses
from tandem.trace import RoutingTrace, read_trace

TRACES = Path(__file__).parents[2] / "data" / "traces"
NAMES = ("deepseek-v2-lite", "gpt-oss-20b")
MACHINES = ("laptop-8gb", "ddr4-12gb", "desktop-12gb", "desktop-16gb", "desktop-24gb")
SHARES = (0.25, 0.5)
BATCHES = (1, 4, 8)
COLUMNS = ("fetching", "chosen", "ahead", "asked", "forecast", "planned")
GOALS = {
    "fetching at 8 tokens, median": 1.2, "chosen, least": 0.995, "ahead, least": 0.995,
    "asked, least": 0.995, "forecast, within": 0.02,
}  # fmt: skip
PLAIN = PlannerSettings()
# Slots for prefetches are set aside with and without them, as device `cuda` has them for prompts.
SLOTS_AHEAD = PlannerSettings(
    prediction="regression", prefetch_count=2, must_prefetch=False, copies_prompts=True
)


class Cell:
    """One trace on one machine with a share of its experts resident."""

    def __init__(self, trace: RoutingTrace, machine: str, share: float, limit: int) -> None:
        """Run the trial, as a load does; each replay then has `limit` steps."""
        self._trace, self._guesses, self._limit = trace, with_guesses(trace), limit
        geometry = trace.meta.geometry
        self._profile: HardwareProfile = load_profile(machine)
        model = shape_for(self._profile, trace.meta.model, geometry)
        self._shape: ShapeCosts = self._profile.charged(model, GRAPH)
        self._num_slots = round(share * geometry.num_layers * geometry.num_experts)
        self._chosen, look_ahead = (
            settled(
                each, self._profile, self._shape, geometry, self._num_slots, tables=NATIVE_TABLES
            )
            for each in (SLOTS_AHEAD, dataclasses.replace(SLOTS_AHEAD, can_ask=True))
        )
        self._asking_sizes = look_ahead.asking_sizes

    def ratios(self, batch: int) -> dict[str, Any]:
        """Return the columns at a batch size, with the trial's rule."""
        rule = self._chosen.rule(graph_tokens=batch)
        plain, fetching = (self._run_seconds(name, batch) for name in (GRAPH_RULE, FETCHING_RULE))
        took = fetching if rule == FETCHING_RULE else plain
        forecast = self._seconds(rule, batch, Timeline(self._profile, self._shape))
        planned = self._seconds(PLANNED_RULE, batch, Timeline(self._profile, self._shape))
        still = self._seconds(rule, batch, self._clock(), SLOTS_AHEAD)

        def gain(settings: PlannerSettings) -> float:
            return still / self._seconds(rule, batch, self._clock(), settings)

        size, ahead = capture_size(batch), 1.0
        if size in self._chosen.predicting_sizes:
            ahead = gain(SLOTS_AHEAD.with_predictions(CAPTURE_SIZES))
        looking_ahead = ahead
        if size in self._asking_sizes:
            looking_ahead = gain(SLOTS_AHEAD.with_predictions((), CAPTURE_SIZES))
        found = (
            plain / fetching,
            plain / took,
            ahead,
            looking_ahead,
            took / forecast,
            plain / planned,
        )
        return {"rule": rule} | dict(zip(COLUMNS, found, strict=True))

    def _run_seconds(self, rule: str, batch: int) -> float:
        return self._seconds(rule, batch, self._clock())

    def _clock(self) -> CoordinatorClock:
        return CoordinatorClock(self._profile, self._shape)

    def _seconds(
        self, rule: str, batch: int, clock: Timeline, settings: PlannerSettings = PLAIN
    ) -> float:
        """Return the seconds of the decode steps under a rule."""
        geometry = self._trace.meta.geometry
        settings = dataclasses.replace(settings, assignment=rule)
        run = ReplaySettings(
            settings=settings,
            profile=self._profile,
            shape=self._shape,
            num_slots=self._num_slots,
            batch=batch,
            prompt=0,
            limit=self._limit * batch,
            compare_every=0,
            in_graph=rule in IN_GRAPH,
            tables=NATIVE_TABLES,
        )
        sizes = settings.set_sizes(geometry, self._num_slots)
        resident = SIMULATED_STARTS.factory("random")(geometry, sizes, None)
        trace = self._guesses if settings.asking_sizes else self._trace
        return replay(trace, run, resident=resident, clock=clock).decode_seconds


def cells(limit: int) -> Iterator[dict[str, Any]]:
    """Yield every trace, machine, share of resident experts and batch with its ratios."""
    for name in NAMES:
        trace = read_trace(TRACES / f"{name}.npz")
        for machine in MACHINES:
            for share in SHARES:
                cell = Cell(trace, machine, share, limit)
                for batch in BATCHES:
                    where = {"trace": name, "machine": machine, "resident": share, "tokens": batch}
                    yield where | cell.ratios(batch)


def main() -> int:
    """Print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=200, help="steps of each replay")
    flags = parser.parse_args()
    print(f"| routing, machine, resident, tokens | {' | '.join(COLUMNS)} | the trial's rule |")
    print("|---" * (2 + len(COLUMNS)) + "|")
    found = []
    for cell in cells(flags.limit):
        found.append(cell)
        where = f"{cell['trace']}, {cell['machine']}, {cell['resident']:.0%}, {cell['tokens']}"
        ratios = " | ".join(f"{cell[name]:.3f}" for name in COLUMNS)
        print(f"| {where} | {ratios} | `{cell['rule']}` |", flush=True)
    most = {
        f"fetching at {size} tokens, median": median(
            cell["fetching"] for cell in found if cell["tokens"] == size
        )
        for size in BATCHES
    }
    most |= {
        f"asked at {size} tokens, median": median(
            cell["asked"] for cell in found if cell["tokens"] == size
        )
        for size in BATCHES
    }
    chosen = ("chosen", "ahead", "asked")
    least = {f"{name}, least": min(cell[name] for cell in found) for name in chosen}
    off = {"forecast, within": max(abs(cell["forecast"] - 1.0) for cell in found)}
    print(json.dumps({"cells": found, "goals": GOALS, **most, **least, **off}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

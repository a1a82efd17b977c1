"""What decode steps in one graph lose to plans: `python -m benchmarks.policy.graph_rules`.

Real routing on the virtual clock, with one graph's host costs for all rules and nothing copied
ahead, from a cache of random experts. Each cell is the time of a decode step over that of
`balanced`, which a graph cannot follow: 1 is as quick. The goal is 1.002 at batch 1 for
`balanced-in-graph`. What a second launch costs host and GPU, also where nothing is fetched, is not
in it, as it has not been measured.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.hardware.profiles import load_profile, shape_for
from tandem.policy.assignment import IN_GRAPH
from tandem.policy.cost import GRAPH
from tandem.policy.settings import PLANNED_RULE, PlannerSettings
from tandem.sim.replay import ReplaySettings, replay
from tandem.sim.start import SIMULATED_STARTS
from tandem.trace import RoutingTrace, read_trace

TRACES = Path(__file__).parents[2] / "data" / "traces"
NAMES = ("deepseek-v2-lite", "gpt-oss-20b")
MACHINES = ("laptop-8gb", "desktop-12gb")
SHARES = (0.25, 0.5)
BATCHES = (1, 4, 8)
GOAL = 1.002  # of `balanced-in-graph` at batch 1


def step_seconds(
    trace: RoutingTrace, machine: str, rule: str, share: float, batch: int, limit: int
) -> float:
    """Return the mean seconds of a decode step whose experts are assigned by a rule."""
    profile, geometry = load_profile(machine), trace.meta.geometry
    settings = PlannerSettings(assignment=rule)
    num_slots = round(share * geometry.num_layers * geometry.num_experts)
    run = ReplaySettings(
        settings=settings,
        profile=profile,
        shape=profile.charged(shape_for(profile, trace.meta.model, geometry), GRAPH),
        num_slots=num_slots,
        batch=batch,
        prompt=0,
        limit=limit * batch,
        compare_every=0,
        in_graph=rule in IN_GRAPH,
    )
    resident = SIMULATED_STARTS.factory("random")(
        geometry, settings.set_sizes(geometry, num_slots), None
    )
    tally = replay(trace, run, resident=resident)
    return tally.decode_seconds / tally.decode_steps


def cells(limit: int) -> Iterator[dict[str, Any]]:
    """Yield every trace, machine, share of resident experts and batch with its rules."""
    for name in NAMES:
        trace = read_trace(TRACES / f"{name}.npz")
        for machine in MACHINES:
            for share in SHARES:
                for batch in BATCHES:
                    base, *others = (
                        step_seconds(trace, machine, rule, share, batch, limit)
                        for rule in (PLANNED_RULE, *IN_GRAPH)
                    )
                    ratios = (seconds / base for seconds in others)
                    found = {"trace": name, "machine": machine, "resident": share, "batch": batch}
                    yield found | dict(zip(IN_GRAPH, ratios, strict=True))


def main() -> int:
    """Print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=200, help="steps of each replay")
    flags = parser.parse_args()
    print(f"| routing, machine, resident, batch | {' | '.join(IN_GRAPH)} |")
    print("|---" * (1 + len(IN_GRAPH)) + "|")
    found = []
    for cell in cells(flags.limit):
        found.append(cell)
        where = f"{cell['trace']}, {cell['machine']}, {cell['resident']:.0%}, {cell['batch']}"
        ratios = " | ".join(f"{cell[rule]:.4f}" for rule in IN_GRAPH)
        print(f"| {where} | {ratios} |", flush=True)
    worst = max(cell["balanced-in-graph"] for cell in found if cell["batch"] == 1)
    print(json.dumps({"cells": found, "goal": GOAL, "worst": worst}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

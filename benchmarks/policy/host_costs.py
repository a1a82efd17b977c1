"""The host's own work in a decode step: `python -m benchmarks.policy.host_costs`.

Real routing on the virtual clock, batch 1, with experts of Qwen3-30B-A3B's sizes in int4. Each cell
is the speed with a path's host costs over the speed without any: 1 means that they are hidden. A
graph decides as it runs (by the rule of the trial at load); segments, and the speed without host
costs, use plans (`balanced`). All costs are those of the profiles, which name their sources; none
was measured on a GPU.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from tandem.hardware.profiles import load_profile
from tandem.policy.cost import NO_HOST, HardwareProfile
from tandem.sim.simulation import Conditions, run_timed
from tandem.sim.systems import TANDEM
from tandem.trace import RoutingTrace, read_trace

TRACES = Path(__file__).parents[2] / "data" / "traces"
SHAPE = "qwen3-30b-a3b"
MACHINES = {"4090-like": "desktop-24gb", "3060-like": "ddr4-12gb"}
PATHS = ("segments", "graph")
GOAL = 0.9  # of the path "graph"


def with_geometry(profile: HardwareProfile, trace: RoutingTrace) -> HardwareProfile:
    """Return the profile with `SHAPE`'s times for a model of a trace's layers and experts."""
    geometry = trace.meta.geometry
    shape = dataclasses.replace(
        profile.shape(SHAPE),
        num_moe_layers=geometry.num_layers,
        num_experts=geometry.num_experts,
        top_k=geometry.top_k,
    )
    return dataclasses.replace(profile, shapes=(shape,))


def speed(
    trace: RoutingTrace, profile: HardwareProfile, share: float, path: str, limit: int
) -> float:
    """Return the decode speed in tokens per second with the host costs of a path."""
    conditions = Conditions(
        profile=with_geometry(profile, trace),
        gpu_experts=share,
        limit=limit,
        shape=SHAPE,
        compare_every=0,
        host_path=path,
    )
    return run_timed(trace, TANDEM, conditions).decode_tokens_per_second()


def cells(limit: int) -> list[dict[str, Any]]:
    """Return the speeds of every trace, machine and share of resident experts.

    Raises `ValueError` for a limit that leaves a trace no decode step.
    """
    found: list[dict[str, Any]] = []
    for name in ("deepseek-v2-lite", "gpt-oss-20b"):
        trace = read_trace(TRACES / f"{name}.npz")
        for machine, hardware in MACHINES.items():
            profile = load_profile(hardware)
            for share in (0.25, 0.5):
                alone, *charged = (
                    speed(trace, profile, share, path, limit) for path in (NO_HOST, *PATHS)
                )
                if alone == 0.0:
                    raise ValueError(f"{name} has no decode step by then; raise --limit")
                found.append(
                    {"trace": name, "machine": machine, "resident": share, NO_HOST: alone}
                    | dict(zip(PATHS, (each / alone for each in charged), strict=True))
                )
    return found


def main() -> int:
    """Print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=1200, help="tokens of each replay")
    flags = parser.parse_args()
    try:
        found = cells(flags.limit)
    except ValueError as error:
        parser.error(str(error))
    print("| routing, machine, resident | tok/s without host costs | segments | graph |")
    print("|---|---|---|---|")
    for cell in found:
        print(
            f"| {cell['trace']}, {cell['machine']}, {cell['resident']:.0%} | {cell[NO_HOST]:.1f} "
            f"| {cell['segments']:.3f} | {cell['graph']:.3f} |"
        )
    print(json.dumps({"cells": found, "goal": GOAL, "least": min(c["graph"] for c in found)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What plans that know reads bring over a disk: `python -m benchmarks.policy.three_tiers`.

Real routing on the virtual clock of a GPU, memory and a disk, where the GPU has slots for a quarter
of the experts and memory for a half; steps and prompts are planned. Speed of decode steps with the
reads' seconds in the plans over that without, by trace, machine, disk and sequences at once, and of
prompts of 60 tokens. The last line is one JSON object.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from statistics import median

from tandem.experts.cache.policy_tables import host_slot_eviction
from tandem.hardware.profiles import load_profile
from tandem.policy.cost import DiskCosts
from tandem.sim.disk import HostShare
from tandem.sim.replay import Tally
from tandem.sim.simulation import Conditions, run_timed
from tandem.sim.systems import TANDEM
from tandem.trace import RoutingTrace, read_trace

TRACES = Path(__file__).parents[2] / "data" / "traces"
NAMES = ("deepseek-v2-lite", "gpt-oss-20b")
MACHINES = ("desktop-12gb", "laptop-8gb")
DISKS = (2e9, 7e9)  # bytes per second
BATCHES, PROMPT = (1, 8), 60


def replayed(
    trace: RoutingTrace, conditions: Conditions, share: float, *, plans_reads: bool
) -> Tally:
    """Replay with memory for a share of the experts."""
    memory = HostShare(
        share=share, make_eviction=host_slot_eviction("next-use"), plans_reads=plans_reads
    )
    return run_timed(trace, TANDEM, dataclasses.replace(conditions, memory=memory))


def main() -> None:
    """Print a line for each cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu-experts", type=float, default=0.25)
    parser.add_argument("--host-experts", type=float, default=0.5)
    parser.add_argument("--limit", type=int, default=600, help="tokens of a replay")
    options = parser.parse_args()
    ratios: dict[str, float] = {}
    for name in NAMES:
        trace = read_trace(TRACES / f"{name}.npz")
        for machine, rate, batch in (
            (machine, rate, batch) for machine in MACHINES for rate in DISKS for batch in BATCHES
        ):
            disk = DiskCosts(reads="direct", piece_bytes=1, depths=(1,), bytes_per_second=(rate,))
            conditions = Conditions(
                profile=dataclasses.replace(load_profile(machine), disk=disk),
                gpu_experts=options.gpu_experts, batch=batch, limit=options.limit,
                prompt=PROMPT if batch == 1 else 1, host_path="segments",
            )  # fmt: skip
            before, after = (
                replayed(trace, conditions, options.host_experts, plans_reads=knows)
                for knows in (False, True)
            )
            cell = f"{name}, {machine}, {rate / 1e9:.0f} GB/s, {batch} at once"
            speeds = [tally.decode_tokens_per_second() for tally in (before, after)]
            ratios[cell] = speeds[1] / speeds[0]
            line = f"{cell}: {speeds[0]:.1f} -> {speeds[1]:.1f} tok/s, {ratios[cell]:.3f}"
            if batch == 1:
                prompts = before.prefill_seconds / after.prefill_seconds
                ratios[f"{cell}, prompts"] = prompts
                line += f"; prompts {prompts:.3f}"
            print(f"{line}; reads {before.reads} -> {after.reads}", flush=True)
    found = sorted(ratios.values())
    print(json.dumps({"least": found[0], "median": median(found), "cells": ratios}))


if __name__ == "__main__":
    main()

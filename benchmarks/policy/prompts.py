"""A prompt's time over that of its link or GPU: `python -m benchmarks.policy.prompts`.

Qwen3-30B-A3B in int4 on the virtual clock, typical routing. A prompt takes at least as long as its
copies on the link, or its work on the GPU; each cell is its time over the longer of these. The
excess over 1 comes from copies that wait for a layer's router, and from a GPU that waits for
copies.
"""

import argparse
import dataclasses
import json
import sys
from typing import Any

from tandem.bench.model_shapes import find_shape
from tandem.forecast.gpu_forecast import costs_for, geometry_of, shape_sizes
from tandem.hardware.profiles import load_profile
from tandem.hf.config import OffloadConfig
from tandem.sim.replay import ReplaySettings, replay
from tandem.sim.start import SIMULATED_STARTS
from tandem.sim.systems import TANDEM
from tandem.sim.typical_routing import typical_routing

SETTINGS = dataclasses.replace(TANDEM, copies_prompts=True)
MACHINES = ("ddr4-12gb", "desktop-12gb", "desktop-24gb")
PATHS = ("segments", "graph")
GOAL = 1.1


def cells(prompt: int) -> list[dict[str, Any]]:
    """Return the time of a prompt on every machine with each share of resident experts."""
    sizes = shape_sizes(find_shape("qwen3-30b-a3b"), OffloadConfig(expert_dtype="int4"))
    geometry = geometry_of(sizes)
    trace = typical_routing(geometry, num_sequences=2, num_tokens=prompt + 1)
    found = []
    for name in MACHINES:
        profile = load_profile(name)
        for share in (0.25, 0.5):
            slots = round(share * sizes.num_experts)
            resident = list(
                SIMULATED_STARTS.factory("hottest")(
                    geometry, SETTINGS.set_sizes(geometry, slots), trace.sequences(0, 1)
                )
            )
            for path in PATHS:
                run = ReplaySettings(
                    settings=SETTINGS,
                    profile=profile,
                    shape=profile.charged(costs_for(sizes, profile), path),
                    num_slots=slots,
                    prompt=prompt,
                    compare_every=0,
                    limit=prompt,
                )
                tally = replay(trace.sequences(1, 2), run, resident=resident)
                least = max(tally.link_busy_seconds, tally.gpu_busy_seconds)
                found.append(
                    {
                        "machine": name,
                        "resident": share,
                        "path": path,
                        "milliseconds": tally.prefill_seconds * 1e3,
                        "link": tally.link_busy_seconds * 1e3,
                        "gpu": tally.gpu_busy_seconds * 1e3,
                        "cpu": tally.cpu_busy_seconds * 1e3,
                        "ratio": tally.prefill_seconds / least,
                    }
                )
    return found


def main() -> int:
    """Print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    found = cells(parser.parse_args().prompt)
    print("| machine, resident, path | ms | link | GPU | CPU | over the longer of link and GPU |")
    print("|---|---|---|---|---|---|")
    for cell in found:
        times = " | ".join(f"{cell[key]:.0f}" for key in ("milliseconds", "link", "gpu", "cpu"))
        where = f"{cell['machine']}, {cell['resident']:.0%}, {cell['path']}"
        print(f"| {where} | {times} | {cell['ratio']:.2f} |")
    print(json.dumps({"cells": found, "goal": GOAL, "worst": max(c["ratio"] for c in found)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Records what a model's routers choose, then asks the simulator what a GPU would make of it.

python examples/trace_and_simulate.py path/to/model prompts.txt
"""

import argparse
from pathlib import Path

from tandem.cli.main import main as tandem_command
from tandem.hardware.profiles import load_profile
from tandem.policy.settings import PlannerSettings
from tandem.sim.simulation import Conditions, simulate
from tandem.trace import read_trace


def main() -> None:
    """Record, replay with two policies at three sizes of the expert cache, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a checkpoint directory")
    parser.add_argument("prompts", help="a text file with a prompt on each line")
    parser.add_argument("--trace", type=Path, default=Path("trace.npz"))
    parser.add_argument("--max-new-tokens", type=int, default=32)
    flags = parser.parse_args()

    record = ["trace", "record", flags.model, "--prompts", flags.prompts, "-o", str(flags.trace)]
    exit_code = tandem_command([*record, "--max-new-tokens", str(flags.max_new_tokens)])
    if exit_code:
        raise SystemExit(exit_code)

    trace = read_trace(flags.trace)
    profile = load_profile("desktop-12gb")  # or a file that `tandem profile` wrote
    print("eviction   experts on the GPU   hit rate   decode, tok/s (simulated)")
    for eviction in ("lru", "next-use"):
        for share in (0.25, 0.5, 0.75):
            conditions = Conditions(profile=profile, gpu_experts=share, prompt=4)
            found = simulate(trace, PlannerSettings(eviction=eviction), conditions)
            speed = found["decode_tokens_per_second"] or 0.0
            print(f"{eviction:<10} {share:<20.0%} {found['hit_rate']:<10.1%} {speed:.1f}")


if __name__ == "__main__":
    main()

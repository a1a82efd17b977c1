"""Draft lengths on real routing: python -m benchmarks.policy.speculation [--sure]

For each trace, share of experts on the GPU and drafter: decode speed on the virtual clock with
drafts of a fixed length, and with the length by cost, over that without drafts.
"""

import argparse
import dataclasses
import json
from statistics import mean

from tandem.hardware.profiles import load_profile
from tandem.policy.settings import PlannerSettings
from tandem.sim.simulation import Conditions, run_timed
from tandem.sim.speculation import SpeculationChoice
from tandem.trace import RoutingTrace, read_trace

TRACES = ("deepseek-v2-lite", "gpt-oss-20b")
SHARES = (0.0, 0.5)
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
LENGTHS = ("1", "2", "3", "5", "7")


def main() -> None:
    """Measure and print a table; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=int, default=3000)
    parser.add_argument("--hardware", default="desktop-12gb")
    parser.add_argument("--gpu-experts", nargs="+", type=float, default=SHARES)
    parser.add_argument("--traces", nargs="+", default=TRACES)
    parser.add_argument("--sure", action="store_true", help="a layer that tells how sure it is")
    args = parser.parse_args()
    drafters = [f"{'sure-' if args.sure else ''}mtp={share}" for share in ACCEPTANCES]
    print(f"{'trace':<18} {'GPU':>4} {'drafter':<12} {'best':>5} {'fixed':>6} {'auto':>6} ratio")
    ratios = []
    for name in args.traces:
        trace = read_trace(f"data/traces/{name}.npz")
        lookup = [] if trace.token_ids is None or args.sure else ["n-gram"]
        for share in args.gpu_experts:
            conditions = Conditions(
                profile=load_profile(args.hardware), gpu_experts=share, limit=args.limit,
                compare_every=0,
            )  # fmt: skip
            none = speed(trace, conditions, None)
            for drafter in (*lookup, *drafters):
                length, fixed, auto = measured(trace, conditions, drafter, none)
                ratios.append(auto / fixed)
                print(
                    f"{name:<18} {share:>4} {drafter:<12} {length:>5} "
                    f"{fixed:6.2f} {auto:6.2f} {ratios[-1]:5.2f}",
                    flush=True,
                )
    print(f"mean of auto over the best fixed length: {mean(ratios):.3f}")
    print(json.dumps({"auto_over_best_fixed": mean(ratios), "worst": min(ratios)}))


def measured(
    trace: RoutingTrace, conditions: Conditions, drafter: str, none: float
) -> tuple[str, float, float]:
    """Return the best fixed length with its speed-up, and that of the length by cost."""

    def over_none(length: str) -> float:
        return speed(trace, conditions, SpeculationChoice.parsed(drafter, length)) / none

    fixed = {"0": 1.0, **{length: over_none(length) for length in LENGTHS}}
    best = max(fixed, key=lambda length: fixed[length])
    return best, fixed[best], over_none("auto")


def speed(trace: RoutingTrace, conditions: Conditions, choice: SpeculationChoice | None) -> float:
    """Return the decode speed on the virtual clock."""
    own = dataclasses.replace(conditions, speculation=choice)
    return run_timed(trace, PlannerSettings(), own).decode_tokens_per_second()


if __name__ == "__main__":
    main()

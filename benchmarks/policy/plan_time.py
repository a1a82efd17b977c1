"""How long one plan takes: `python -m benchmarks.policy.plan_time`; last line: one JSON object.

Everything is in it: learning from the load, prediction, prefetch choice, assignment, admission,
victims, the plan object. The routing is a seeded random walk in which experts follow each other;
half the experts fit. Thread time, so that other programs do not count.
"""

import json
import random
import time
from statistics import median

from tandem.policy.cost import CostTable
from tandem.policy.plan import Geometry, LayerLoad
from tandem.policy.settings import make_planner
from tandem.sim.profiles import load_profile
from tandem.sim.systems import TANDEM

BUDGET_MICROSECONDS = {1: 60.0, 32: 500.0}  # issue 3: the ceiling of a median
WARM_UP_STEPS, STEPS, LAYERS, EXPERTS, TOP_K = 60, 150, 8, 128, 8


def routing(draw: random.Random, batch: int) -> list[list[int]]:
    """Return the experts of each token: popular ones more often."""
    rows = []
    for _ in range(batch):
        chosen: set[int] = set()
        while len(chosen) < TOP_K:
            chosen.add(int(EXPERTS * draw.random() ** 1.7))
        rows.append(sorted(chosen))
    return rows


def load_of(layer: int, rows: list[list[int]]) -> LayerLoad:
    """Return the load of tokens that chose these experts."""
    tokens: dict[int, int] = {}
    for row in rows:
        for expert in row:
            tokens[expert] = tokens.get(expert, 0) + 1
    experts = tuple(sorted(tokens))
    return LayerLoad(layer, experts, tuple(tokens[e] for e in experts), (), rows)


def plan_times(batch: int) -> dict[str, float]:
    """Return median and p99 in microseconds at top-8 of 128, and of layers without a miss."""
    draw = random.Random(0)
    geometry = Geometry(LAYERS, EXPERTS, TOP_K)
    profile = load_profile("desktop-12gb")
    costs = CostTable(profile.shape("qwen3-30b-a3b"))
    planner = make_planner(TANDEM, geometry, costs, LAYERS * EXPERTS // 2)
    now, times, resident_times, active = 0.0, [], [], []
    for step in range(WARM_UP_STEPS + STEPS):
        tokens = tuple(draw.randrange(1000) for _ in range(batch))
        pending = list(planner.begin_step(batch, now, token_ids=tokens))
        for layer in range(LAYERS):
            load = load_of(layer, routing(draw, batch))
            now += costs.dense(batch)
            for copy in pending:
                planner.copy_finished(copy.layer, copy.expert, now)
            start = time.thread_time()
            plan = planner.plan(load, now)
            seconds = time.thread_time() - start
            pending = [*plan.fetch, *plan.insert, *plan.prefetch]
            now += plan.seconds
            if step >= WARM_UP_STEPS:
                times.append(seconds * 1e6)
                active.append(len(load.experts))
                if len(plan.gpu) == len(load.experts):
                    resident_times.append(seconds * 1e6)
    times.sort()
    return {
        "batch": batch,
        "active_experts": round(sum(active) / len(active), 1),
        "median_microseconds": round(median(times), 1),
        "p99_microseconds": round(times[int(0.99 * len(times))], 1),
        "all_resident_median_microseconds": round(median(resident_times), 1)
        if resident_times
        else -1.0,
    }


def main() -> None:
    """Print a row per batch as a share of its budget, then the JSON line."""
    results = [plan_times(batch) for batch in (1, 8, 32)]
    print("plan at top-8 of 128, half resident; budget: 60 us at batch 1, 500 us at batch 32")
    for result in results:
        budget = BUDGET_MICROSECONDS.get(int(result["batch"]))
        share = f", {result['median_microseconds'] / budget:.0%} of budget" if budget else ""
        print(
            f"batch {result['batch']:2.0f}: {result['active_experts']:5.1f} active, median "
            f"{result['median_microseconds']:6.1f} us, p99 {result['p99_microseconds']:6.1f}{share}"
        )
    print(json.dumps({"plans": results}))


if __name__ == "__main__":
    main()

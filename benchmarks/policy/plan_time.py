"""How long one plan takes: `python -m benchmarks.policy.plan_time`; last line: one JSON object.

Everything that a layer waits for is in it: noting the load, prediction, prefetch choice,
assignment, admission, victims, the plan object. Learning from the load is timed apart: it runs
while CPU and GPU work (`learn`). The routing is random, popular experts more often; half the
experts fit.
"""

import json
import random
import time
from statistics import mean, median
from typing import NamedTuple

from tandem.hardware.profiles import load_profile
from tandem.policy.cost import CostTable
from tandem.policy.plan import Geometry, LayerLoad
from tandem.policy.residency import READY
from tandem.policy.settings import RING_SLOTS, make_planner
from tandem.sim.systems import TANDEM

BUDGET_MICROSECONDS = {1: 60.0, 32: 500.0}  # the ceiling of a median
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


class Timed(NamedTuple):
    """One plan."""

    microseconds: float
    learning_microseconds: float
    active_experts: int
    has_misses: bool


def timed_plans(batch: int, resident_share: float) -> list[Timed]:
    """Return the plans after a warm-up; experts are resident from the start."""
    draw = random.Random(0)
    geometry = Geometry(LAYERS, EXPERTS, TOP_K)
    profile = load_profile("desktop-12gb")
    costs = CostTable(profile.shape("qwen3-30b-a3b"))
    ways = round(EXPERTS * resident_share)
    resident = [geometry.key(layer, expert) for layer in range(LAYERS) for expert in range(ways)]
    num_slots = LAYERS * ways + RING_SLOTS
    planner = make_planner(TANDEM, geometry, costs, num_slots, resident=resident)
    now, plans = 0.0, []
    for step in range(WARM_UP_STEPS + STEPS):
        tokens = tuple(draw.randrange(1000) for _ in range(batch))
        pending = list(planner.begin_step(batch, now, token_ids=tokens))
        for layer in range(LAYERS):
            load = load_of(layer, routing(draw, batch))
            now += costs.dense(batch)
            for copy in pending:
                planner.copy_finished(copy.layer, copy.expert, now)
            held = bytes(map(planner.residency.state.__getitem__, keys_of(geometry, load)))
            start = time.perf_counter()
            plan = planner.plan(load, now)
            planned = time.perf_counter()
            planner.learn()
            learned = time.perf_counter()
            pending = [*plan.fetch, *plan.insert, *plan.prefetch]
            now += plan.seconds
            if step >= WARM_UP_STEPS:
                has_misses = held.count(READY) < len(held)
                plan_us, learn_us = (planned - start) * 1e6, (learned - planned) * 1e6
                plans.append(Timed(plan_us, learn_us, len(load.experts), has_misses))
    return plans


def keys_of(geometry: Geometry, load: LayerLoad) -> list[int]:
    """Return the keys of a layer's active experts."""
    return [geometry.key(load.layer, expert) for expert in load.experts]


def summary(batch: int) -> dict[str, float]:
    """Return median and p99 with half the experts resident, and what layers without a miss cost.

    `whole_model`: nothing is absent anywhere. `all_hits`: the layer happens to have no miss, but
    the cache must still learn from it (7 of 8 experts resident; -1 where no layer was like that).
    """
    half = timed_plans(batch, 0.5)
    times = sorted(plan.microseconds for plan in half)
    whole = [plan.microseconds for plan in timed_plans(batch, 1.0)]
    hits = [plan.microseconds for plan in timed_plans(batch, 0.875) if not plan.has_misses]
    return {
        "batch": batch,
        "active_experts": round(mean(plan.active_experts for plan in half), 1),
        "median_microseconds": round(median(times), 1),
        "p99_microseconds": round(times[int(0.99 * len(times))], 1),
        "learning_median_microseconds": round(median(p.learning_microseconds for p in half), 1),
        "whole_model_resident_median_microseconds": round(median(whole), 1),
        "all_hits_median_microseconds": round(median(hits), 1) if hits else -1.0,
    }


def main() -> None:
    """Print a row per batch as a share of its budget, then the JSON line."""
    print("plan at top-8 of 128, half resident; budget: 60 us at batch 1, 500 us at batch 32")
    results = [summary(batch) for batch in (1, 8, 32)]
    for result in results:
        budget = BUDGET_MICROSECONDS.get(int(result["batch"]))
        share = f", {result['median_microseconds'] / budget:.0%} of budget" if budget else ""
        hits = result["all_hits_median_microseconds"]
        print(
            f"batch {result['batch']:2.0f}: {result['active_experts']:5.1f} active, median "
            f"{result['median_microseconds']:6.1f} us, p99 {result['p99_microseconds']:6.1f}{share}"
            f"; whole model resident: {result['whole_model_resident_median_microseconds']:.1f} us"
            + (f"; layer without a miss: {hits:.1f} us" if hits >= 0 else "")
            + f"; learning: {result['learning_median_microseconds']:.1f} us beside CPU and GPU"
        )
    print(json.dumps({"plans": results}))


if __name__ == "__main__":
    main()

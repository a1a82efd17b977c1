"""DALI's speeds, plans and ablations, replayed on the profile of its testbed.

Numbers from its text are beside each replay. Its figures are images, so their numbers are unknown
except those in the text.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from statistics import median

from benchmarks.papers.replays import RELEASED, Measure, Replays, plain
from benchmarks.papers.table import NONE, Table, mean, shown

from tandem.hardware.profiles import shape_for
from tandem.policy.assignment.problem import equation_seconds
from tandem.policy.plan import LayerLoad, LayerPlan
from tandem.sim.replay import Compared, ReplaySettings, Tally, replay
from tandem.sim.start import SIMULATED_STARTS
from tandem.sim.systems import System

Ablation = Callable[[Replays, str], float | None]  # of a trace by name
LARGE, SMALL, LONG_BATCH = 32, 8, 16  # the batches of table 9, table 6 and long answers
# Section 6: decode and prefill speed over each system, on average over batches 8 to 128.
SPEEDUPS: dict[str, tuple[float, float | None]] = {
    "llama.cpp": (3.97, 7.62),
    "ktransformers": (2.16, 3.80),
    "MoE-Lightning": (1.48, 2.45),
    "hybrimoe": (1.32, 2.00),
    RELEASED.name: (1.32, 2.00),
    "fiddler": (14.3, None),
}
# Table 4, DeepSeek-V2-Lite: seconds of the MoE layers by batch, of the exact and the greedy plans.
PLANS = {16: (12.4, 14.4), 32: (19.7, 22.4)}
# Table 9, DeepSeek-V2-Lite: tokens per second and sequence; HybriMoE's, then DALI's by (w, u).
HYBRIMOE_SPEED = 1.25
WINDOWS = {(2, 8): 1.84, (2, 16): 1.76, (4, 8): 1.89, (4, 16): 1.83, (8, 8): 1.97}
OVERHEADS = {"hybrimoe": 3.01, "dali": 4.50, "tandem": None}  # table 6: percent of the time
LONGER = {"llama.cpp": 2.78, "ktransformers": 1.96, "hybrimoe": 1.47}  # 128 to 1,024 tokens


def decode_speed(tally: Tally) -> float | None:
    """Return the decode speed of all sequences together."""
    return tally.decode_tokens_per_second()


def prefill_speed(tally: Tally) -> float | None:
    """Return the prefill speed."""
    return tally.prefill_tokens_per_second()


def link_share(tally: Tally) -> float | None:
    """Return the share of time in which the link is busy."""
    return min(1.0, tally.link_busy_seconds / tally.total_seconds)


def speedups(replays: Replays) -> Table:
    """Return DALI's and Tandem's speed over each system, averaged over batches; long answers."""
    names = list(replays.traces)
    head = ["speed over"]
    for phase in ("decode", "prefill"):
        head += [f"{phase}: theirs", *[f"{name}: DALI, Tandem" for name in names]]
    rows = []
    for base, stated in SPEEDUPS.items():
        cells = [base]
        for number, speed in zip(stated, (decode_speed, prefill_speed), strict=True):
            cells.append(shown(number, ".2f"))
            cells += [_speedup(replays, name, base, speed, replays.batches()) for name in names]
        rows.append(cells)
    long = replays.longer()
    for base, number in LONGER.items():
        found = [_speedup(long, name, base, decode_speed, [LONG_BATCH]) for name in names]
        rows.append([f"{base}, long answers", f"{number:.2f}", *found, *[NONE] * (1 + len(names))])
    return Table(head, rows)


def _speedup(replays: Replays, name: str, base: str, speed: Measure, batches: Sequence[int]) -> str:
    if base == "MoE-Lightning":
        return NONE
    ratios = [
        mean(
            replays.ratio(
                name, replays.system(name, ours), replays.system(name, base), speed, batch=batch
            )
            for batch in batches
        )
        for ours in ("dali", "tandem")
    ]
    return NONE if ratios[0] is None else ", ".join(shown(ratio, ".2f") for ratio in ratios)


def windows(replays: Replays) -> Table:
    """Return table 9: DALI by w_size and u_size at batch 32."""
    head = [
        "(over HybriMoE)",
        "HybriMoE",
        *[f"({w}, {u})" for w, u in WINDOWS],
        RELEASED.name,
        "Tandem",
    ]
    stated = [HYBRIMOE_SPEED, *WINDOWS.values()]
    cells = [f"{speed:.2f} ({speed / HYBRIMOE_SPEED:.2f})" for speed in stated]
    rows = [["DALI's paper, DeepSeek-V2-Lite: tok/s", *cells, NONE, NONE]]
    for name in replays.traces:
        dali = replays.system(name, "dali")
        chosen = [replays.system(name, "hybrimoe")]
        chosen += [_with_window(dali, *window) for window in WINDOWS]
        chosen += [RELEASED, replays.system(name, "tandem")]
        tallies = [replays.tally(name, system, batch=LARGE) for system in chosen]
        known = [tally for tally in tallies if tally is not None]
        if len(known) < len(chosen):
            continue  # too few sequences for the batch
        speeds = [tally.decode_tokens_per_second() / min(LARGE, replays.most) for tally in known]
        rows += [
            [f"here, {name}: tok/s", *[f"{each:.1f} ({each / speeds[0]:.2f})" for each in speeds]],
            [f"here, {name}: hit rate", *[f"{t.hits / t.demands:.3f}" for t in known]],
        ]
    return Table(head, rows)


def _with_window(dali: System, window: int, swaps: int) -> System:
    options = (("window", window), ("swaps", swaps))
    settings = dataclasses.replace(dali.settings, eviction_options=options)
    return dali._replace(name=f"dali ({window}, {swaps})", settings=settings)


def plans(replays: Replays) -> Table:
    """Return table 4: seconds of greedy plans over those of exact ones, 32 decode tokens."""
    head = ["greedy over exact", *[f"batch {batch}" for batch in PLANS]]
    stated = [f"{greedy / exact:.2f} ({greedy} / {exact} s)" for exact, greedy in PLANS.values()]
    rows = [["DALI's paper, DeepSeek-V2-Lite", *stated]]
    for name in replays.traces:
        cells = []
        for batch in PLANS:
            exact, greedy = plan_seconds(replays, name, min(batch, replays.most))
            cells.append(f"{greedy / exact:.2f} ({greedy:.2f} / {exact:.2f} s)" if exact else NONE)
        rows.append([f"here, {name}", *cells])
    return Table(head, rows)


def plan_seconds(replays: Replays, name: str, batch: int) -> tuple[float, float]:
    """Return the seconds of exact and greedy plans of the same decode layers, by equations 3-9.

    DALI runs, and each of its layers is planned both ways. Zeros for a trace of too few pieces.
    """
    trace, geometry = replays.pieces(name), replays.geometry(name)
    if trace.num_sequences < batch:
        return 0.0, 0.0
    print(f"{name}, batch {batch}: exact plans", file=sys.stderr, flush=True)
    conditions = replays.conditions(batch)
    dali = replays.system(name, "dali")
    run = ReplaySettings(
        settings=dali.settings,
        profile=conditions.profile,
        shape=shape_for(conditions.profile, trace.meta.model, geometry),
        num_slots=conditions.num_slots(trace),
        batch=batch,
        prompt=replays.prompt,
        limit=batch * (replays.prompt + replays.generated // 2),
        compare_every=1,
    )
    sums = [0.0, 0.0]

    def watch(
        step: int, load: LayerLoad, plan: LayerPlan, compared: Compared, rule: str, now: float
    ) -> None:
        if sum(load.tokens) == batch * geometry.top_k:  # decode steps
            split = compared.split
            sums[0] += compared.optimal_seconds or 0.0
            sums[1] += max(equation_seconds(compared.problem, split.fetch, split.spill))

    sizes = run.settings.set_sizes(geometry, run.num_slots)
    resident = SIMULATED_STARTS.factory(dali.start)(geometry, sizes, None)
    replay(trace, run, resident=resident, watch=watch)
    return sums[0], sums[1]


def ablations(replays: Replays) -> Table:
    """Return the gain of each part: section 6.3 and figures 5, 18 and 19."""
    names = list(replays.traces)
    rows = []
    for what, stated, one in ABLATIONS:
        rows.append([what, stated, *[shown(one(replays, name), ".2f") for name in names]])
    return Table(["what", "theirs", *names], rows)


def _assigned(assignment: str, base: str = "cpu-only", gpu_experts: float = 0.5) -> Ablation:
    """Compare two assignments with the same, fixed residents."""

    def ratio(replays: Replays, name: str) -> float | None:
        ours, other = plain(assignment), plain(base)
        return replays.ratio(name, ours, other, decode_speed, batch=LARGE, gpu_experts=gpu_experts)

    return ratio


def _cached(assignment: str, eviction: str, base: str) -> Ablation:
    """Compare two evictions under the same assignment."""

    def ratio(replays: Replays, name: str) -> float | None:
        ours, other = plain(assignment, eviction), plain(assignment, base)
        return replays.ratio(name, ours, other, decode_speed, batch=LARGE)

    return ratio


def _step_of_19(eviction: str, base: str, *, adds_prefetch: bool) -> Ablation:
    """Compare a step of figure 19 with the one before: a quarter resident, prefetch or cache."""

    def ratio(replays: Replays, name: str) -> float | None:
        dali = replays.system(name, "dali")
        pair = [
            dali._replace(
                name=f"dali, prefetch, {each}",
                settings=dataclasses.replace(dali.settings, eviction=each),
            )
            for each in (eviction, base)
        ]
        if adds_prefetch:
            pair[1] = plain("dali", base)
        return replays.ratio(
            name, pair[0], pair[1], decode_speed, batch=LARGE, gpu_experts=0.25,
            has_hints=(True, not adds_prefetch),
        )  # fmt: skip

    return ratio


def _link(which: str) -> Ablation:
    """Return the share of time in which the link copies."""

    def share(replays: Replays, name: str) -> float | None:
        tally = replays.tally(name, replays.system(name, which), batch=LARGE)
        return None if tally is None else link_share(tally)

    return share


def _more_hits(window: tuple[int, int], base: tuple[int, int]) -> Ablation:
    """Return the hit rate minus that of another window, in percentage points."""

    def points(replays: Replays, name: str) -> float | None:
        dali = replays.system(name, "dali")
        pair = [
            replays.tally(name, _with_window(dali, *each), batch=LARGE) for each in (window, base)
        ]
        known = [tally.hits / tally.demands for tally in pair if tally is not None]
        return 100 * (known[0] - known[1]) if len(known) == 2 else None

    return points


ABLATIONS: list[tuple[str, str, Ablation]] = [
    ("speed of HybriMoE's schedule over all on the CPU", "3.58", _assigned("hybrimoe")),
    ("the same as released", "3.58", _assigned("hybrimoe-released")),
    ("speed of the greedy assignment over all on the CPU", "4.42", _assigned("dali")),
    ("speed of Tandem's `balanced` over all on the CPU", NONE, _assigned("balanced")),
    (
        "speed of DALI's cache over HybriMoE's, both greedy", "1.23",
        _cached("dali", "dali-window", "hybrimoe"),
    ),
    (
        "the same over HybriMoE's as released", "1.23",
        _cached("dali", "dali-window", "hybrimoe-released"),
    ),
    (
        "speed of Tandem's `next-use` over HybriMoE's cache, both `balanced`", NONE,
        _cached("balanced", "next-use", "hybrimoe"),
    ),
    (
        "figure 19: greedy over all on the CPU, a quarter resident", "4.1",
        _assigned("dali", gpu_experts=0.25),
    ),
    (
        "figure 19: prefetch on top; here the prediction is perfect", "1.09",
        _step_of_19("static", "static", adds_prefetch=True),
    ),
    (
        "figure 19: its cache on top", "1.38",
        _step_of_19("dali-window", "static", adds_prefetch=False),
    ),
    ("figure 5: share of the time with copies, HybriMoE", "up to .78", _link("hybrimoe")),
    ("the same as released", "up to .78", _link(RELEASED.name)),
    ("the same, DALI", NONE, _link("dali")),
    ("the same, Tandem", NONE, _link("tandem")),
    ("figure 18: hit rate, (2, 16) above (2, 8), points", "4.2", _more_hits((2, 16), (2, 8))),
    ("figure 18: hit rate, (4, 8) above (8, 8), points", "7.1", _more_hits((4, 8), (8, 8))),
]  # fmt: skip


def overheads(replays: Replays) -> Table:
    """Return table 6: the share of time that planning takes, batch 8."""
    rows = []
    for which, stated in OVERHEADS.items():
        cells = [which, shown(stated, ".1f") + (" %" if stated else "")]
        for name in replays.traces:
            tally = replays.tally(name, replays.system(name, which), batch=SMALL)
            if tally is None:
                cells.append(NONE)
                continue
            plan = median(tally.plan_seconds)
            step = tally.decode_seconds / tally.decode_steps
            share = plan * replays.geometry(name).num_layers / step
            cells.append(f"{share:.1%} ({plan * 1e6:.0f} us a layer)")
        rows.append(cells)
    return Table(["planning, of the time", "theirs", *replays.traces], rows)

"""`tandem simulate`: replay routing traces through the planner on a hardware profile."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.cli.progress import shows_progress
from tandem.cli.simulate_disk import DiskOptions, print_disk_summary, simulate_disk, with_disk
from tandem.core.config import add_flags, from_flags, option
from tandem.core.errors import ConfigError
from tandem.core.units import format_bytes

if TYPE_CHECKING:
    from tandem.policy.settings import PlannerSettings
    from tandem.sim.simulation import Conditions, Progress, Report
    from tandem.trace import RoutingTrace

LISTS = "list"
# Flags that also apply to experts on a disk.
_OF_DISKS = ("hardware", "shape", "eviction", "batch", "prompt", "limit", "hold_out", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of `tandem simulate`; options that take a name print all names if it is `list`."""

    hardware: str = option(
        "desktop-12gb", metavar="NAME|FILE",
        help="machine: a built-in profile or the path of one; `list` shows their names",
    )  # fmt: skip
    shape: str | None = option(
        None, help="model shape whose costs are used (default: by the trace's model)"
    )
    host_path: str | None = option(
        None, metavar="NAME",
        help="path whose host costs are added: segments, graph or none (default: the profile's)",
    )  # fmt: skip
    gpu_experts: float = option(
        0.5, help="fraction of all experts that the GPU has room for", metavar="FRACTION"
    )
    assignment: str | None = option(
        None,
        help="who computes each active expert (default: balanced; with --host-path graph, what a "
        "trial chooses)",
    )
    eviction: str = option("next-use", help="eviction policy of the expert cache")
    prediction: str | None = option(
        None, help="predictor of the next experts, for --prefetch (default: regression)"
    )
    prefetch_choice: str | None = option(
        None, help="which predicted experts are prefetched, for --prefetch (default: pays)"
    )
    start: str = option("empty", help="initial content of the expert cache")
    pool: str = option("by-layer", help="slots by-layer or shared by all layers")
    prefetch: int = option(0, help="number of prefetches per layer", metavar="K")
    costs: str = option(
        "pipeline", choices=("pipeline", "equations"),
        help="what `balanced` minimises: overlapped copies, or DALI's equations 3-9",
    )  # fmt: skip
    batch: int = option(1, help="number of sequences in the batch")
    prompt: int = option(16, help="first tokens of each sequence, which run as its prompt")
    limit: int | None = option(None, help="stop after this many tokens", metavar="TOKENS")
    speculate: str | None = option(
        None, metavar="DRAFTER",
        help="verify drafted tokens: n-gram (look-up in the trace), mtp=ACCEPTANCE, or "
        "sure-mtp=ACCEPTANCE (which reports each token's chance)",
    )  # fmt: skip
    length: str = option(
        "auto", help="how many drafted tokens: by cost, or always K", metavar="auto|K"
    )
    hold_out: int = option(0, help="leave the last N sequences out", metavar="N")
    dump: str | None = option(None, help="write every plan as JSON lines", metavar="FILE")
    compare: bool = option(False, help="run the systems of the papers at equal GPU memory")
    picture: str | None = option(
        None, help="draw the chart of --compare into this file (compare.svg)", metavar="FILE"
    )
    verbose: bool = option(False, help="also print figures for authors of policies")
    json: bool = option(False, help="print one JSON object on the last line of output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tandem simulate`."""
    parser.add_argument("traces", nargs="*", metavar="TRACE", help="routing traces (.npz)")
    add_flags(parser, SimulateOptions)
    add_flags(parser, DiskOptions)


def run(flags: argparse.Namespace) -> int:
    """Simulate every trace and report; returns the exit code."""
    options = from_flags(SimulateOptions, flags)
    if _print_lists(options):
        return 0
    disk = from_flags(DiskOptions, flags)
    is_without_gpu = disk.disk is not None and flags.gpu_experts is None
    if is_without_gpu:
        _require_of_disks(flags)
    if not flags.traces:
        raise ConfigError("no trace given; expected at least one routing trace (.npz)")
    if options.compare:
        if disk.disk is not None:
            raise ConfigError("--compare has all experts in memory; leave --disk out")
        return _compare(flags.traces, options)
    if options.picture is not None:
        raise ConfigError("--picture draws what --compare finds; give --compare too")
    results = _simulate_all(flags.traces, options, disk, is_without_gpu=is_without_gpu)
    for path, result in results.items():
        if is_without_gpu:
            print_disk_summary(path, result)
        else:
            _print_summary(path, result, is_verbose=options.verbose)
    if options.json:
        print(json.dumps(_merge(results)))
    return 0


def _require_of_disks(flags: argparse.Namespace) -> None:
    """Raise `ConfigError` if a flag was given that has no effect without a GPU.

    Called when --disk is given without --gpu-experts.
    """
    names = (field.name for field in fields(SimulateOptions))
    others = [n for n in names if n not in _OF_DISKS and vars(flags).get(n) is not None]
    if others:
        shown = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise ConfigError(
            f"{shown}: with --disk the CPU computes all experts, and what memory has no slot for "
            "is read; leave it out, or give --gpu-experts, too"
        )


def _print_lists(options: SimulateOptions) -> bool:
    from tandem.hardware.profiles import profile_names
    from tandem.policy.eviction import EVICTIONS
    from tandem.policy.settings import POOLS
    from tandem.sim.start import SIMULATED_STARTS
    from tandem.sim.systems import POLICIES

    known: dict[str, list[str]] = {
        "hardware": profile_names(),
        "assignment": POLICIES.assignments.names(),
        "eviction": EVICTIONS.names(),
        "prediction": POLICIES.predictions.names(),
        "prefetch_choice": POLICIES.prefetches.names(),
        "start": SIMULATED_STARTS.names(),
        "pool": list(POOLS),
    }
    requested = {name: names for name, names in known.items() if asdict(options)[name] == LISTS}
    for names in requested.values():
        print("\n".join(names))
    if requested and options.json:
        print(json.dumps(requested))
    return bool(requested)


def _settings(options: SimulateOptions) -> "PlannerSettings":
    from tandem.sim.systems import SimulatedSettings

    by_equations = options.costs == "equations"
    settings = SimulatedSettings(
        assignment=options.assignment,
        assignment_options=(("pipelined", False),) if by_equations else (),
        eviction=options.eviction,
        prediction=options.prediction or ("regression" if options.prefetch else "none"),
        prefetch=options.prefetch_choice or "pays",
        prefetch_count=options.prefetch,
        pool=options.pool,
    )
    unused = None
    if by_equations and settings.rule() != "balanced":
        unused = f"--costs equations: only assignment balanced has them, not {options.assignment}"
    elif options.prefetch == 0 and options.prediction is not None:
        unused = "--prediction: nothing is prefetched, as --prefetch is 0"
    elif options.prefetch == 0 and options.prefetch_choice is not None:
        unused = "--prefetch-choice: nothing is prefetched, as --prefetch is 0"
    if unused is not None:
        raise ConfigError(f"{unused}; leave it out, or change the other")
    return settings


def _conditions(options: SimulateOptions) -> "Conditions":
    from tandem.hardware.profiles import load_profile
    from tandem.sim.simulation import Conditions
    from tandem.sim.speculation import SpeculationChoice

    drafter = options.speculate
    return Conditions(
        profile=load_profile(options.hardware),
        gpu_experts=options.gpu_experts,
        batch=options.batch,
        prompt=options.prompt,
        limit=1 << 60 if options.limit is None else options.limit,
        shape=options.shape,
        start=options.start,
        hold_out=options.hold_out,
        host_path=options.host_path,
        speculation=None if drafter is None else SpeculationChoice.parsed(drafter, options.length),
    )


def _simulate_all(
    paths: Sequence[str], options: SimulateOptions, disk: DiskOptions, *, is_without_gpu: bool
) -> dict[str, "Report"]:
    from contextlib import ExitStack

    from tandem.sim.simulation import simulate
    from tandem.trace import read_trace

    settings, conditions = _settings(options), _conditions(options)
    traces = {path: read_trace(path) for path in paths}
    results = {}
    with ExitStack() as stack:
        dump_to = None
        if options.dump:
            dump_to = stack.enter_context(Path(options.dump).open("w", encoding="utf-8"))

        def simulated(trace: "RoutingTrace", progress: "Progress") -> "Report":
            if is_without_gpu:
                return simulate_disk(trace, conditions, settings.eviction, disk, progress)
            tiers = conditions
            if disk.disk is not None:
                costs = conditions.plain_costs(trace)
                tiers = with_disk(conditions, costs, settings.eviction, disk)
            return simulate(trace, settings, tiers, dump_to=dump_to, progress=progress)

        for path, trace in traces.items():
            total = min(conditions.limit, trace.num_tokens)
            bar = stack.enter_context(_progress_bar(total, Path(path).stem))
            results[path] = simulated(trace, bar.update)
    return results


def _progress_bar(total: int, name: str) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc=name, unit=" tokens", disable=not shows_progress(), leave=False)


def _print_summary(path: str, result: "Report", *, is_verbose: bool) -> None:
    way = f", decode steps in one graph by {result['assignment']}" if result["in_graph"] else ""
    print(f"{path}: {result['tokens']} tokens of {result['model']} on {result['hardware']}{way}")
    speed = result["decode_tokens_per_second"]
    print(
        ("  no decode step within the limit" if speed is None else f"  decode {speed:.1f} tok/s")
        + f"; the GPU's memory has {result['hit_rate']:.0%} of the experts that are used (with LRU "
        f"{result['lru_hit_rate']:.0%}, knowing the future {result['belady_hit_rate']:.0%})"
    )
    if result["bytes_read"]:
        print(
            f"  memory has slots for {result['host_experts']:.0%} of the experts; "
            f"{format_bytes(result['bytes_read'] / result['tokens'])} read a token, prompts' too"
        )
    if result["speculation"]["drafted"]:
        speculation = result["speculation"]
        print(
            f"  {speculation['drafted']} tokens drafted, {speculation['accepted']} accepted, "
            f"{speculation['tokens_per_step']:.2f} tokens a step"
        )
    if is_verbose:
        _print_details(result)


def _print_details(result: "Report") -> None:
    """Print the details that authors of policies need."""
    over, closed = result["plan_over_optimal"]["mean"], result["gap_closed"]
    gap = f", {closed:.0%} of the gap" if closed else ""
    print(
        f"  hit rate {result['hit_rate']:.3f} (LRU {result['lru_hit_rate']:.3f}, Belady "
        f"{result['belady_hit_rate']:.3f}{gap})"
    )
    busy = ", ".join(f"{name} {share:.0%}" for name, share in result["busy"].items())
    plan = result["plan_microseconds"]
    print(f"  busy: {busy}; a plan takes {plan['median']:.0f} us (p99 {plan['p99']:.0f})")
    if over is not None:
        overlapped = result["plan_over_optimal"]["executed_overlapped_mean"]
        shares = [f"{round(share, 6) + 0.0:.2%}" for share in (over, overlapped)]  # avoids -0.00%
        print(
            f"  plans by equations 3-9 are {shares[0]} above the optimum, executed plans "
            f"{shares[1]} above that of overlapped copies"
        )


def _merge(results: dict[str, "Report"]) -> "Report":
    """Return the result of a single trace, or a report with means, sums and all traces' results."""
    if len(results) == 1:
        return next(iter(results.values()))
    merged = _mean(list(results.values()))
    assert isinstance(merged, dict)
    for name in {"tokens", "steps", "bytes_fetched", "bytes_read"}.intersection(merged):
        merged[name] = sum(result[name] for result in results.values())
    return {**merged, "traces": results}


def _mean(values: list[Any]) -> Any:
    """Return the mean of numbers; for dictionaries, a dictionary of means by key.

    Returns equal texts as they are; None for unequal texts, or if all values are None.
    """
    if all(isinstance(value, dict) for value in values):
        return {key: _mean([value[key] for value in values]) for key in values[0]}
    if all(isinstance(value, str) for value in values):
        return values[0] if len(set(values)) == 1 else None
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def _compare(paths: Sequence[str], options: SimulateOptions) -> int:
    from tandem.sim.compare import compare, table, without_decode
    from tandem.sim.picture import Chart, svg
    from tandem.trace import read_trace

    if len(paths) != 1:
        raise ConfigError(f"--compare got {len(paths)} traces; expected one")
    trace, conditions = read_trace(paths[0]), _conditions(options)
    batches, fractions = (1, 8, 32), (0.25, 0.5, 0.75)
    with _progress_bar(0, "systems") as bar:
        speeds = compare(
            trace,
            conditions,
            batches=batches,
            fractions=fractions,
            progress=lambda _: bar.update(1),
        )
    print(table(speeds))
    missing = without_decode(speeds, conditions.limit)
    if missing is not None:
        print(missing, file=sys.stderr)
    names = list(dict.fromkeys(speed.system for speed in speeds))
    known = {(s.system, s.batch, s.gpu_experts): s.decode_tokens_per_second for s in speeds}
    memory, batch = conditions.gpu_experts, conditions.batch
    charts = [
        Chart(
            f"{trace.meta.model} on {conditions.profile.name}: decode tok/s at {memory:.0%}",
            "batch",
            [str(b) for b in batches],
            {name: [known[name, b, memory] for b in batches] for name in names},
        ),
        Chart(
            f"decode tok/s at batch {batch}",
            "experts on the GPU",
            [f"{fraction:.0%}" for fraction in fractions],
            {name: [known[name, batch, f] for f in fractions] for name in names},
        ),
    ]
    picture = options.picture or "compare.svg"
    Path(picture).write_text(svg(charts), encoding="utf-8")
    print(f"picture: {picture}", file=sys.stderr)
    if options.json:
        print(json.dumps({"systems": [speed._asdict() for speed in speeds]}))
    return 0

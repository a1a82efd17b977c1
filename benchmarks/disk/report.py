"""Formats the results as Markdown rows; pure functions."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.disk.job import Job

Runs = Sequence[Mapping[str, Any]]
Found = Mapping[str, Mapping[str, Runs]]


def lines(found: Found, fit: Job | None) -> list[str]:
    """Return the tables, limit by limit."""
    rows = []
    computing = None
    for limit, systems in found.items():
        rows += ["", f"{limit}:", ""]
        if "fit" in systems:
            rows += _fit_rows(systems["fit"][0])
            computing = _computing_by_layer(systems["fit"][0], fit)
            continue
        rows += ["| system | what | found |", "|---|---|---|"]
        for name, runs in systems.items():
            good = [run for run in runs if "failed" not in run]
            if len(good) < len(runs):
                rows.append(f"| {name} | runs that ended with an error | {len(runs) - len(good)} |")
            rows += [
                f"| {name} | {what} | {text} |" for what, text in _system_rows(good, computing)
            ]
        rows += _ratio_rows(systems)
    return rows


def _computing_by_layer(run: Mapping[str, Any], fit: Job | None) -> float | None:
    if fit is None or "failed" in run:
        return None
    return float(run["seconds"]["mapped"]["prompt"]) / fit.fit_layers


def _fit_rows(run: Mapping[str, Any]) -> list[str]:
    if "failed" in run:
        return [f"ended with an error ({run['failed']})"]
    seconds, ratio = run["seconds"], run["speed_over_mapped"]
    return [
        "| what | slots | mapped | speed of slots over mapped |",
        "|---|---|---|---|",
        f"| decode step | {1e3 * seconds['slots']['step']:.2f} ms "
        f"| {1e3 * seconds['mapped']['step']:.2f} ms | {ratio['step']:.3f} |",
        f"| prompt | {seconds['slots']['prompt']:.2f} s | {seconds['mapped']['prompt']:.2f} s "
        f"| {ratio['prompt']:.3f} |",
    ]


def _system_rows(runs: Runs, computing: float | None) -> list[tuple[str, str]]:
    if not runs:
        return []

    def of(*path: str) -> float:
        return median(_at(run, path) for run in runs)

    rows = [("decode, ms a token", f"{of('decode', 'ms'):.1f}")]
    if "device_mb" in runs[0]["decode"]:
        rows.append(("the disk read, MB a token", f"{of('decode', 'device_mb'):.1f}"))
        rows.append(("major faults a token", f"{of('decode', 'major_faults'):.0f}"))
    if "disk_rates" in runs[0]:
        rates = ", ".join(f"{of('disk_rates', d) / 1e9:.2f}" for d in runs[0]["disk_rates"])
        rows.append(("disk at depth 1, 4, 16, and after a rest, GB/s", rates))
    if "over_bound" in runs[0]["decode"]:
        rows += _bound_rows(of)
    rows.append(("prompt, s", f"{median(_all(runs, 'prompts', 'seconds')):.2f}"))
    if "slots_share" in runs[0]:
        rows += _slots_rows(runs, of, computing)
    for is_first, which in ((True, "first start"), (False, "later start")):
        starts = [run for run in runs if run.get("is_first_start") is is_first]
        if starts:
            rows.append((f"{which} to the first token, s; over bytes / disk rate", _start(starts)))
    rows.append(("kills for memory", str(sum(run["kills"] for run in runs))))
    return rows


def _start(runs: Runs) -> str:
    """Return the times of cold starts until loaded and until ready, over the bound."""
    loaded, ready, first = (
        median(run[name] for run in runs)
        for name in ("load_seconds", "ready_seconds", "first_token_seconds")
    )
    needed = median(run["cold_needed_bytes"] / max(run["disk_rates"].values()) for run in runs)
    return f"{first:.1f} (loaded {loaded:.1f}, ready {ready:.1f}); {first / needed:.2f}"


def _bound_rows(of: Callable[..., float]) -> list[tuple[str, str]]:
    return [
        ("bound of a step, ms; time over it",
         f"{of('decode', 'bound_ms'):.1f}; {of('decode', 'over_bound'):.2f}"),
        ("time over the bound with the rate after a rest",
         f"{of('decode', 'over_rested_bound'):.2f}"),
        ("hit rate; LRU's in as many slots",
         f"{of('decode', 'hit_rate'):.3f}; {of('decode', 'lru_hit_rate'):.3f}"),
        ("bytes of the disk over those asked for", f"{of('decode', 'device_over_requested'):.3f}"),
        ("waited for the disk, ms a token", f"{of('decode', 'waited_ms'):.1f}"),
    ]  # fmt: skip


def _slots_rows(
    runs: Runs, of: Callable[..., float], computing: float | None
) -> list[tuple[str, str]]:
    rows = [("experts that slots hold", f"{of('slots_share'):.0%}")]
    bounds, seconds = [], []
    for run in runs:
        rate = max(run["disk_rates"].values())
        layers = len(run.get("num_slots", ())) or 0
        for took, absent in zip(
            run["prompts"]["seconds"], run["prompts"]["absent_bytes"], strict=True
        ):
            seconds.append(took)
            bounds.append(max(absent / rate, (computing or 0.0) * layers))
    if median(bounds) > 0 and computing is not None:
        over = median(took / bound for took, bound in zip(seconds, bounds, strict=True))
        rows.append(
            ("prompt: max(absent bytes / disk rate, computing), s; time over it",
             f"{median(bounds):.2f}; {over:.2f}")
        )  # fmt: skip
    return rows


def _ratio_rows(systems: Mapping[str, Runs]) -> list[str]:
    """Return the speed of slots over other systems, as medians over adjacent turns."""
    rows = []
    for ours, others in (("slots", ("mapped",)), ("own-slots", None)):
        if ours not in systems:
            continue
        names = others or tuple(n for n in systems if n not in ("slots", "own-slots", "mapped"))
        for name in filter(systems.__contains__, names):
            pairs = [
                (a, b)
                for a, b in zip(systems[ours], systems[name], strict=True)
                if "failed" not in a and "failed" not in b
            ]
            if not pairs:
                continue
            decode = median(b["decode"]["ms"] / a["decode"]["ms"] for a, b in pairs)
            prompt = median(
                median(b["prompts"]["seconds"]) / median(a["prompts"]["seconds"]) for a, b in pairs
            )
            rows.append(f"| {ours} over {name} | decode, prompt | {decode:.1f}, {prompt:.1f} |")
    return rows


def _at(run: Mapping[str, Any], path: Sequence[str]) -> float:
    value: Any = run
    for key in path:
        value = value[key]
    return float(value)


def _all(runs: Runs, *path: str) -> list[float]:
    found: list[float] = []
    for run in runs:
        value: Any = run
        for key in path:
            value = value[key]
        found += value
    return found

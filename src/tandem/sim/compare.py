"""The systems of the papers side by side at equal GPU memory: speed by batch and by cache size."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tandem.sim.simulation import Conditions, run_timed
from tandem.sim.systems import System, systems
from tandem.trace import RoutingTrace


class Speed(NamedTuple):
    """The speed of one system at one batch size and one cache size."""

    system: str
    batch: int
    gpu_experts: float
    decode_tokens_per_second: float | None  # None: the limit allowed no decode step
    prefill_tokens_per_second: float | None


def compare(
    trace: RoutingTrace,
    conditions: Conditions,
    *,
    batches: Sequence[int],
    fractions: Sequence[float],
    progress: Callable[[str], None] | None = None,
) -> list[Speed]:
    """Run every system at each batch size of `batches`, and at each cache size of `fractions`.

    Cache sizes are as in `Conditions.gpu_experts`. Runs by batch size have the cache size of
    `conditions`, and runs by cache size its batch size.
    """
    cells = [(batch, conditions.gpu_experts) for batch in batches]
    cells += [(conditions.batch, fraction) for fraction in fractions]
    speeds = []
    for batch, fraction in dict.fromkeys(cells):
        for system in systems(trace.meta.geometry):
            speeds.append(_run(trace, conditions, system, batch, fraction))
            if progress is not None:
                progress(system.name)
    return speeds


def _run(
    trace: RoutingTrace, conditions: Conditions, system: System, batch: int, fraction: float
) -> Speed:
    held_out = max(1, trace.num_sequences // 5) if trace.num_sequences > 1 else 0
    tally = run_timed(
        trace,
        system.settings,
        dataclasses.replace(
            conditions,
            batch=batch,
            gpu_experts=fraction,
            start=system.start,
            hold_out=held_out,
            compare_every=0,
        ),
    )
    return Speed(
        system.name,
        batch,
        fraction,
        tally.decode_tokens_per_second() or None,
        tally.prefill_tokens_per_second(),
    )


def table(speeds: Sequence[Speed]) -> str:
    """Return decode speeds as a Markdown table.

    A row is a system; a column is a batch size with a cache size.
    """
    cells = list(dict.fromkeys((speed.batch, speed.gpu_experts) for speed in speeds))
    names = list(dict.fromkeys(speed.system for speed in speeds))
    known = {(s.system, s.batch, s.gpu_experts): s.decode_tokens_per_second for s in speeds}
    heads = [f"batch {batch}, {fraction:.0%}" for batch, fraction in cells]
    lines = ["| decode tok/s | " + " | ".join(heads) + " |", "|---" * (len(cells) + 1) + "|"]
    for name in names:
        row = [known[name, *cell] for cell in cells]
        shown = ["-" if speed is None else f"{speed:.1f}" for speed in row]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def without_decode(speeds: Sequence[Speed], limit: int) -> str | None:
    """Return a sentence about the batch sizes that decoded no token; None if all decoded some."""
    batches = sorted({speed.batch for speed in speeds if speed.decode_tokens_per_second is None})
    if not batches:
        return None
    return (
        f"batch {', '.join(map(str, batches))}: a limit of {limit} tokens ends within the prompts, "
        "so there is no decode speed; expected more tokens than the prompts of a batch have"
    )

"""Systems that take turns: each is a process that stands still while another is timed."""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict

from benchmarks.generation.systems import Setting, Speeds, System
from benchmarks.still_process import StillProcess

_SECONDS = 1800  # until it is ready, and for a measurement

# Puts a system's model into memory; of this module's callers, as it is sent to another process.
Maker = Callable[[Setting], System]


def _prepared(make: Maker, setting: Setting) -> tuple[bool, Callable[[int], Speeds]]:
    return True, make(setting).measure


def measure_rounds(
    groups: Sequence[Mapping[str, Maker]], setting: Setting, depths: list[int], rounds: int
) -> dict[str, dict[int, list[Speeds]]]:
    """Measure the systems of each group in turn, depth by depth."""
    found: dict[str, dict[int, list[Speeds]]] = {}
    for makers in groups:
        with ExitStack() as running:
            processes = {
                name: running.enter_context(
                    closing(StillProcess(_prepared, make, setting, seconds=_SECONDS))
                )
                for name, make in makers.items()
            }
            found |= {name: {depth: [] for depth in depths} for name in makers}
            for depth, _, name in itertools.product(depths, range(rounds), makers):
                speeds = processes[name].ask(depth, _SECONDS)
                found[name][depth].append(speeds)
                print(f"{name:12} depth {depth:6}: {line(speeds)}", flush=True)
    return found


def line(speeds: Speeds) -> str:
    """Return speeds for people."""
    text = f"prefill {speeds.prefill:7.1f} tok/s, decode {speeds.decode:6.1f} tok/s"
    if speeds.decode_ceiling:
        text += (
            f"  ({speeds.prefill / speeds.prefill_ceiling:.0%} and "
            f"{speeds.decode / speeds.decode_ceiling:.0%} of the ceilings)"
        )
    return text


def median(speeds: list[Speeds]) -> Speeds:
    """Return the median of each speed."""
    columns = zip(*(tuple(asdict(s).values()) for s in speeds), strict=True)
    return Speeds(*(statistics.median(column) for column in columns))

"""Times systems in turns: each is a process that is stopped while another process is timed."""

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from operator import methodcaller
from typing import Any

from tandem.bench.peers.setting import Choice, Setting, Speeds
from tandem.bench.peers.still_process import StillProcess

_SECONDS = 1800  # timeout for loading, and for one measurement

# Loads a system's model. It must be a module-level function because it is pickled for another
# process. The argument is a setting; some systems take only their own subclass.
Maker = Callable[[Any], Any]
# A system's speeds by depth, one entry per round.
Rounds = Mapping[int, list[Speeds]]
# Called after each measurement with the system, the depth and the speeds.
Tell = Callable[[str, int, Speeds], None]


def _prepared(make: Maker, setting: Setting) -> tuple[bool, Callable[[Any], object]]:
    system = make(setting)
    return True, lambda call: call(system)


class Turns:
    """Several systems, of which only one runs at a time."""

    def __init__(self, processes: Mapping[str, StillProcess]) -> None:
        """Store the stopped processes by name."""
        self._processes = processes

    def measure(self, name: str, depth: int) -> Speeds:
        """Let one system measure its speeds after `depth` tokens."""
        found: Speeds = self._processes[name].ask(methodcaller("measure", depth), _SECONDS)
        return found

    def choices(self, name: str, ids: Sequence[int]) -> list[Choice]:
        """Let one system, a `Chooser`, return its first choices for a text."""
        call = methodcaller("choices", list(ids))
        found: list[Choice] = self._processes[name].ask(call, _SECONDS)
        return found

    def peak_bytes(self, name: str) -> int:
        """Return the peak resident bytes of a system's process; 0: unknown."""
        return self._processes[name].peak_bytes


@contextmanager
def standing_still(makers: Mapping[str, Maker], setting: Setting) -> Iterator[Turns]:
    """Start each system in a `StillProcess`; end all processes after the `with` body.

    Raises `OSError` with the name of a system that cannot start.
    """
    with ExitStack() as running:
        processes = {}
        for name, make in makers.items():
            try:
                process = StillProcess(_prepared, make, setting, seconds=_SECONDS)
            except OSError as error:
                raise OSError(f"{name}: {error}") from error
            processes[name] = running.enter_context(closing(process))
        yield Turns(processes)


def measure_rounds(
    groups: Sequence[Mapping[str, Maker]],
    setting: Setting,
    depths: list[int],
    rounds: int,
) -> dict[str, dict[int, list[Speeds]]]:
    """Measure one group of systems after another, and print the results; see `measured`."""
    found: dict[str, dict[int, list[Speeds]]] = {}
    for makers in groups:
        with standing_still(makers, setting) as turns:
            found |= measured(turns, list(makers), depths, rounds, _print)
    return found


def measured(
    turns: Turns, names: Sequence[str], depths: Sequence[int], rounds: int, tell: Tell
) -> dict[str, dict[int, list[Speeds]]]:
    """Measure started systems in turns, depth by depth; return their speeds by name and depth."""
    found: dict[str, dict[int, list[Speeds]]] = {
        name: {depth: [] for depth in depths} for name in names
    }
    for depth, _, name in itertools.product(depths, range(rounds), names):
        found[name][depth].append(turns.measure(name, depth))
        tell(name, depth, found[name][depth][-1])
    return found


def ratios(ours: list[Speeds], theirs: list[Speeds]) -> tuple[float, float]:
    """Return `ours` / `theirs` for prefill and for decode: the median of the rounds' ratios."""
    pairs = list(zip(ours, theirs, strict=True))
    return (
        statistics.median(a.prefill / b.prefill for a, b in pairs),
        statistics.median(a.decode / b.decode for a, b in pairs),
    )


def table(found: Mapping[str, Rounds], depths: Sequence[int]) -> list[str]:
    """Return the lines of a Markdown table of medians, a row for each depth and system.

    Ratios are the first system's speed divided by the speed of the row's system.
    """
    first = next(iter(found))
    rows = [
        f"| system | depth | prefill, decode tok/s | {first}'s over it | shares of the ceilings |",
        "|---|---|---|---|---|",
    ]
    for depth in depths:
        for name, rounds in found.items():
            speeds = median(rounds[depth])
            prefill, decode = ratios(found[first][depth], rounds[depth])
            shares = "" if not speeds.decode_ceiling else (
                f"{speeds.prefill / speeds.prefill_ceiling:.0%}, "
                f"{speeds.decode / speeds.decode_ceiling:.0%}"
            )  # fmt: skip
            rows.append(
                f"| {name} | {depth} | {speeds.prefill:.1f}, {speeds.decode:.1f} "
                f"| {prefill:.2f}, {decode:.2f} | {shares} |"
            )
    return rows


def line(speeds: Speeds) -> str:
    """Return speeds as one line of text."""
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


def _print(name: str, depth: int, speeds: Speeds) -> None:
    print(f"{name:12} depth {depth:6}: {line(speeds)}", flush=True)

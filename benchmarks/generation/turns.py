"""Systems that take turns: each is a process that stands still while another is timed."""

import itertools
import multiprocessing
import os
import signal
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection

from benchmarks.generation.systems import Setting, Speeds, System

_READY_SECONDS = 1800
_MEASURE_SECONDS = 1800

# Puts a system's model into memory; of this module's callers, as it is sent to another process.
Maker = Callable[[Setting], System]


class SystemProcess:
    """One system in a process that stands still but while it is asked."""

    def __init__(self, make: Maker, setting: Setting) -> None:
        """Start it and wait until its model is in memory."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, setting), daemon=True)
        self._process.start()
        theirs.close()
        self._receive(_READY_SECONDS)
        self._signal(signal.SIGSTOP)

    def measure(self, depth: int) -> Speeds:
        """Return the speeds at a depth; raises OSError with the system's own error."""
        self._signal(signal.SIGCONT)
        self._connection.send(depth)
        speeds = self._receive(_MEASURE_SECONDS)
        self._signal(signal.SIGSTOP)
        assert isinstance(speeds, Speeds)
        return speeds

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.join()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def _receive(self, seconds: float) -> object:
        if not self._connection.poll(seconds):
            raise OSError(f"no answer within {seconds:.0f} s")
        try:
            found = self._connection.recv()
        except EOFError:
            self._process.join()
            raise OSError(
                f"the process ended by itself (exit code {self._process.exitcode})"
            ) from None
        if isinstance(found, str):
            raise OSError(found)
        return found


def _serve(connection: Connection, make: Maker, setting: Setting) -> None:
    """Answer until the process is ended."""
    try:
        system = make(setting)
        connection.send(True)
        while True:
            connection.send(system.measure(connection.recv()))
    except EOFError:
        return
    except Exception as error:  # whatever a system raises is reported by the other side
        connection.send(f"{type(error).__name__}: {error}")


@contextmanager
def _running(makers: Mapping[str, Maker], setting: Setting) -> Iterator[dict[str, SystemProcess]]:
    """Start systems; end them afterwards."""
    processes: dict[str, SystemProcess] = {}
    try:
        for name, make in makers.items():
            processes[name] = SystemProcess(make, setting)
        yield processes
    finally:
        for process in processes.values():
            process.close()


def measure_rounds(
    groups: Sequence[Mapping[str, Maker]], setting: Setting, depths: list[int], rounds: int
) -> dict[str, dict[int, list[Speeds]]]:
    """Measure the systems of each group in turn, depth by depth."""
    found: dict[str, dict[int, list[Speeds]]] = {}
    for makers in groups:
        with _running(makers, setting) as processes:
            found |= {name: {depth: [] for depth in depths} for name in makers}
            for depth, _, name in itertools.product(depths, range(rounds), makers):
                speeds = processes[name].measure(depth)
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

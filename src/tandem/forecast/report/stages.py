"""Runs stages, which each try something on this machine, in a process that may crash or hang.

A driver fault ends the process, and a wait inside a GPU cannot be undone. So a child process runs
the stages. If the child dies or takes too long, its present stage has failed, and a new child
continues with the next stage.
"""

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from tandem.core.errors import TandemError
from tandem.policy.cost import HardwareProfile

_PR_SET_PDEATHSIG = 1  # from Linux's sys/prctl.h
_MOST_DETAILS = 4000  # characters of a traceback; its end says most


class NotHereError(TandemError):
    """The machine lacks what a stage needs, which is not a failure."""


@dataclass(frozen=True, slots=True)
class StageResult:
    """A stage's result: a line of text, and its numbers."""

    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    profile: HardwareProfile | None = None
    """The profile that the stage measured."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: a name, and the function that runs it."""

    name: str
    run: Callable[[], StageResult]
    """A module-level function, because the child process imports it."""
    limit_seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether a stage worked, what it reported, and how long it took."""

    name: str
    state: Literal["ok", "failed", "not here"]
    said: StageResult
    seconds: float
    details: str = ""
    """The end of a failure's traceback."""


def run_stages(stages: Sequence[Stage], begin: Callable[[Stage], None]) -> Iterator[Outcome]:
    """Run stages in order and yield their outcomes; `begin` is called before each."""
    with TemporaryDirectory(prefix="tandem-doctor-") as folder:
        child = _Child(Path(folder) / "stderr")
        try:
            for stage in stages:
                begin(stage)
                yield child.run(stage)
        finally:
            child.end()


class _Child:
    """Runs stages in a child process; starts a new one after a crash or a timeout."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def run(self, stage: Stage) -> Outcome:
        connection, start = self._started(), time.perf_counter()
        found: Outcome | None = None
        try:
            connection.send(stage)
            if connection.poll(stage.limit_seconds):
                found = connection.recv()
        except (EOFError, OSError):
            return self._lost(stage, self._how_it_ended(), time.perf_counter() - start)
        if found is None:
            reason = f"took longer than {stage.limit_seconds:.0f} s"
            return self._lost(stage, reason, time.perf_counter() - start)
        return found

    def end(self) -> None:
        """Kill the process without waiting for its stage."""
        if self._process is not None and self._connection is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
        self._process = self._connection = None

    def _started(self) -> Connection:
        if self._connection is not None:
            return self._connection
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, str(self._errors)), name="tandem-doctor", daemon=False
        )
        self._process.start()
        theirs.close()
        self._connection = ours
        return ours

    def _lost(self, stage: Stage, reason: str, seconds: float) -> Outcome:
        self.end()
        details = _end_of(self._errors.read_text(errors="replace") if self._errors.exists() else "")
        return Outcome(stage.name, "failed", StageResult(reason), seconds, details)

    def _how_it_ended(self) -> str:
        if self._process is None:
            return "its process ended"
        self._process.join()
        code = self._process.exitcode or 0
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"its process ended by {name}"


def _serve(connection: Connection, errors: str) -> None:
    """Run stages in the child process until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also if the parent is killed
    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):  # captures what libraries print, for the details of a failure
        os.dup2(descriptor, stream)
    faulthandler.enable()
    while True:
        try:
            stage: Stage = connection.recv()
        except EOFError:
            return
        os.ftruncate(descriptor, 0)
        connection.send(_outcome(stage))


def _outcome(stage: Stage) -> Outcome:
    start = time.perf_counter()
    try:
        result = stage.run()
    except NotHereError as error:
        return Outcome(stage.name, "not here", StageResult(str(error)), time.perf_counter() - start)
    except Exception as error:
        first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
        seconds = time.perf_counter() - start
        details = _end_of(traceback.format_exc())
        return Outcome(stage.name, "failed", StageResult(first_line), seconds, details)
    return Outcome(stage.name, "ok", result, time.perf_counter() - start)


def _end_of(text: str) -> str:
    return text.strip()[-_MOST_DETAILS:]

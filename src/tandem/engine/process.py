"""The engine process as seen from an event loop.

The loop itself reads, because a thread would cost a thread switch per token. A thread writes, so
that a full pipe never blocks HTTP. Messages are sent in order, and no message is delivered after
`on_end`.
"""

import asyncio
import contextlib
import multiprocessing
import os
import queue
import select
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from tandem.engine.messages import EngineSettings, ModelLoader, Stop

_KILL_AFTER_SECONDS = 10.0
# Messages read at a time, before the loop does other work.
_MOST_MESSAGES = 64
# The engine's nice value. Where clients and model compete for cores, delivering tokens comes before
# computing more.
_NICENESS = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class EngineProcess:
    """One run of the engine process, from start to end."""

    def __init__(
        self,
        load: ModelLoader,
        settings: EngineSettings,
        on_message: Callable[[Any], None],
        on_end: Callable[["EngineProcess"], None],
    ) -> None:
        """Start the process; both callbacks run on the current event loop."""
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(
            target=_run, args=(load, settings, theirs), name="tandem-engine", daemon=True
        )
        with _held_signals():
            self._process.start()
        theirs.close()  # so that this side sees when the process ends
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_end = on_message, on_end
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._has_ended = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._loop.add_reader(self._ours.fileno(), self._read)
        threading.Thread(target=self._write, args=(self._ours,), daemon=True).start()

    @property
    def pid(self) -> int | None:
        """The process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, or minus the number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    def send(self, message: object) -> None:
        """Send a message; no-op if the process is gone."""
        self._outbox.put(message)

    def kill(self) -> None:
        """Kill the process; `on_end` is called once it has ended."""
        self._process.kill()

    async def stop(self, *, is_patient: bool) -> None:
        """Ask the process to end; if `is_patient`, kill it only after 10 seconds, else at once.

        Returns once the process has ended, or 10 seconds after the kill.
        """
        self.send(Stop())
        if is_patient:
            with contextlib.suppress(TimeoutError):
                await self._wait_for_end()
                return
        self._process.kill()
        with contextlib.suppress(TimeoutError):  # not even a kill ends a process that waits for IO
            await self._wait_for_end()

    async def _wait_for_end(self) -> None:
        # Not `wait_for`: in Python 3.11 it loses a Ctrl-C that arrives together with the result.
        async with asyncio.timeout(_KILL_AFTER_SECONDS):
            await self._has_ended.wait()

    def _read(self) -> None:
        """Call `on_message` with each message that has arrived; begin `_end` once the pipe ends."""
        try:
            for message in came(self._ours):
                self._on_message(message)
        except (EOFError, OSError):
            self._loop.remove_reader(self._ours.fileno())
            self._ending = self._loop.create_task(self._end())

    def _write(self, connection: Connection) -> None:
        with contextlib.suppress(OSError):
            while (message := self._outbox.get()) is not None:
                connection.send(message)

    def _join(self) -> None:
        """Wait until the process, which has closed its pipe, ends; kill it after 10 seconds."""
        self._process.join(_KILL_AFTER_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_KILL_AFTER_SECONDS)

    async def _end(self) -> None:
        self._outbox.put(None)
        await asyncio.to_thread(self._join)
        self._ours.close()
        self._has_ended.set()
        self._on_end(self)


def came(connection: Connection) -> Iterator[object]:
    """Yield the messages that have arrived, up to `_MOST_MESSAGES`; waits only for the first.

    A busy event loop rarely calls this: with one message per call, clients would lag behind the
    engine.
    """
    coming = select.poll()
    coming.register(connection.fileno(), select.POLLIN)
    for _ in range(_MOST_MESSAGES):
        yield connection.recv()
        if not coming.poll(0):
            return


@contextlib.contextmanager
def _held_signals() -> Iterator[None]:
    """Block `_SIGNALS` while the body starts a process, in which `_run` unblocks them."""
    resource_tracker.ensure_running()  # starting it unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(load: ModelLoader, settings: EngineSettings, connection: Connection) -> None:
    """Run as the engine process; torch is imported here, not in the process that starts it."""
    # Signals reach the whole process group; the HTTP side decides when this process ends.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.nice(_NICENESS)
    from tandem.engine.engine import run_engine

    run_engine(load, settings, connection)

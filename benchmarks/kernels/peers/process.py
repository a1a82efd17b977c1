"""A peer in a process of its own, which stands still while others are timed.

Peers keep threads that spin when they have nothing to do, bring their own OpenMP, and may crash:
none of it may touch what is measured beside them.
"""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

from tandem.bench.kernels import Work

_START_SECONDS = 120.0
_CALL_SECONDS = 60.0


class PeerProcess:
    """One peer with one store of weights. Raises `OSError` if it fails; close it in the end."""

    def __init__(self, name: str, work: Work) -> None:
        """Start the peer, fill its store and stop it."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, work), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.bytes_per_call, self.format = self._receive(_START_SECONDS)
        except OSError:
            self.close()
            raise
        self._pause()

    def time_calls(self, tokens: int, num_calls: int) -> list[float]:
        """Return the seconds of some calls, each on the next experts; one before is not counted."""
        os.kill(self._pid, signal.SIGCONT)
        self._connection.send((tokens, num_calls))
        seconds: list[float] = self._receive(_CALL_SECONDS)
        self._pause()
        return seconds

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.kill()
        self._process.join()

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def _pause(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def _receive(self, seconds: float) -> Any:
        if not self._connection.poll(seconds):
            raise TimeoutError(f"no answer within {seconds:.0f} s")
        try:
            found = self._connection.recv()
        except EOFError:
            self._process.join()
            raise OSError(f"it ended with exit code {self._process.exitcode}") from None
        if isinstance(found, str):
            raise OSError(found)
        return found


def _serve(connection: Connection, name: str, work: Work) -> None:
    """Answer requests until the other side closes; what fails is sent as a sentence."""
    from benchmarks.kernels.peers import PEERS

    # Their messages do not concern the report, and standard output may end with our JSON.
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    try:
        prepared = PEERS[name].prepare(work)
        connection.send((prepared.bytes_per_call, prepared.format))
        call = 0
        while True:
            tokens, num_calls = connection.recv()
            seconds = []
            for _ in range(num_calls + 1):
                start = time.perf_counter()
                prepared.run(tokens, call)
                seconds.append(time.perf_counter() - start)
                call += 1
            connection.send(seconds[1:])
    except EOFError:
        return
    except Exception as error:  # a peer may raise anything: it is reported, and the others go on
        connection.send(f"{type(error).__name__}: {error}")

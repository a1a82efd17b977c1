"""A peer in a process of its own, which is stopped while others are timed."""

import os
import time
from collections.abc import Callable

from tandem.bench.kernels import Work
from tandem.bench.peers.still_process import StillProcess

_START_SECONDS = 120.0
_CALL_SECONDS = 60.0


class PeerProcess(StillProcess):
    """One peer with its own weights. Raises `OSError` if it fails; close it at the end."""

    def __init__(self, name: str, work: Work) -> None:
        """Start the peer, fill its store and stop it."""
        super().__init__(_prepared, name, work, seconds=_START_SECONDS)
        self.bytes_per_call, self.format = self.prepared

    def time_calls(self, tokens: int, num_calls: int) -> list[float]:
        """Return the seconds of some calls, each on the next experts, after one untimed call."""
        seconds: list[float] = self.ask((tokens, num_calls), _CALL_SECONDS)
        return seconds


def _prepared(
    name: str, work: Work
) -> tuple[tuple[int, str], Callable[[tuple[int, int]], list[float]]]:
    """Fill a peer's store; return the bytes that a call reads, and a function that times calls."""
    from benchmarks.kernels.peers import PEERS

    # Their messages do not concern the report, and standard output may end with our JSON.
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    prepared, call = PEERS[name].prepare(work), 0

    def times(question: tuple[int, int]) -> list[float]:
        nonlocal call
        tokens, num_calls = question
        seconds = []
        for _ in range(num_calls + 1):
            start = time.perf_counter()
            prepared.run(tokens, call)
            seconds.append(time.perf_counter() - start)
            call += 1
        return seconds[1:]

    return (prepared.bytes_per_call, prepared.format), times

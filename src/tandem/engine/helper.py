"""Common parts of helper processes: their messages, and forks that the kernel kills at a limit.

The HTTP side starts a helper for work that may take long or never end. The helper's stdin is a
socket, on which it receives first one message, then one descriptor per job. Each descriptor is a
socket that carries the job as a message. The helper or its fork reads the job, sends `STARTED`,
does the work, sends one message as the answer and closes the socket. An incomplete answer counts as
none. The helper ends when its stdin is closed, as happens when the server ends in any way.
"""

import contextlib
import fcntl
import os
import pickle
import resource
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

STARTED = b"s"
_LENGTH = struct.Struct("<Q")


class Limits(NamedTuple):
    """The resources that a fork may use."""

    processor_seconds: float
    wall_seconds: float
    memory_bytes: int
    """Memory beyond what the helper already uses."""


class Job(Protocol):
    """A message that describes what a fork is to do."""

    @property
    def limits(self) -> Limits:
        """The resources that the fork may use."""


def framed(message: object) -> bytes:
    """Return a message as bytes for a socket: pickled, after its length."""
    data = pickle.dumps(message)
    return _LENGTH.pack(len(data)) + data


def is_whole(data: bytes | bytearray) -> bool:
    """Tell whether `data` is a complete framed message."""
    size = _LENGTH.size
    return len(data) >= size and len(data) >= size + _LENGTH.unpack_from(data)[0]


def unframed(data: bytes | bytearray) -> Any:
    """Return the message that `framed` made into `data`."""
    return pickle.loads(memoryview(data)[_LENGTH.size :])


def read(connection: socket.socket) -> Any:
    """Return the next message; raises `EOFError` if the connection ends before or within it."""
    (length,) = _LENGTH.unpack(_read_bytes(connection, _LENGTH.size))
    return pickle.loads(_read_bytes(connection, length))


def jobs(control: socket.socket) -> Iterator[tuple[bytes, socket.socket]]:
    """Yield the kind (one byte) and the socket of each job, until `control` ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps forks that have ended
    while True:
        kind, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            yield kind, connection


def answer(connection: socket.socket, work: Callable[[Any], object]) -> None:
    """Read a job from `connection`, do it with `work` in this process, and send the answer."""
    with contextlib.suppress(OSError, EOFError):  # the client has closed the connection
        job = read(connection)
        connection.sendall(STARTED)
        connection.sendall(framed(work(job)))


def answer_in_fork(
    control: socket.socket, connection: socket.socket, work: Callable[[Any], object]
) -> None:
    """Fork a process that reads a job, does it with `work` and sends the answer.

    The kernel ends the fork at the job's limits. This call returns without waiting for the fork.
    The calling process must have only one thread, because forking is unsafe otherwise.
    """
    if os.fork():
        return
    try:
        control.close()  # otherwise the fork would keep it open after this process ends
        job: Job = read(connection)
        _limit(connection, job.limits)
        connection.sendall(STARTED)
        found = framed(work(job))
        signal.signal(signal.SIGIO, signal.SIG_IGN)  # sent again when the reader makes room
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):  # a slow reader is no reason to end
            signal.setitimer(timer, 0)
        connection.sendall(found)
    finally:
        os._exit(0)


def _limit(connection: socket.socket, limits: Limits) -> None:
    """Limit this fork's memory; let signals end it at its time limits or if its client leaves."""
    number = connection.fileno()
    fcntl.fcntl(number, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | os.O_ASYNC)
    signal.setitimer(signal.ITIMER_REAL, limits.wall_seconds)
    signal.setitimer(signal.ITIMER_PROF, limits.processor_seconds)
    with open("/proc/self/statm", encoding="ascii") as file:
        num_bytes = int(file.read().split()[0]) * resource.getpagesize() + limits.memory_bytes
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def _read_bytes(connection: socket.socket, length: int) -> bytearray:
    data = bytearray()
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data

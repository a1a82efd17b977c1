"""How many connections there are, how long each may take over what, and which one goes first.

A client costs a file descriptor and some memory before it has shown a key. So connections have a
bound below the process's file descriptors. At the bound the oldest of those that have shown no key
is closed for the next one; if there is none, the one that has waited longest between two requests.
A request with a key that is being answered is never closed for another connection.

What has no end is timed: a head, a body, the pause between requests, an answer that is not read.
A body has time by its length, so that a slow honest client is heard.
"""

import asyncio
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

_SWEEP_SECONDS = 1.0
_MOST_CONNECTIONS = 1024
_FEWEST_CONNECTIONS = 8
# File descriptors for what is no connection: engine process, helpers, files that are read.
_OWN_DESCRIPTORS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What one connection may take, and how many there may be."""

    connections: int = _MOST_CONNECTIONS
    head_bytes: int = 64 << 10
    headers: int = 100
    """As Apache's LimitRequestFields."""
    pipelined: int = 16
    """Requests that are sent before the one before them is answered."""
    head_seconds: float = 20.0
    """From a connection's beginning or its last answer to the end of a request's head."""
    body_seconds: float = 20.0
    body_bytes_per_second: float = 500.0
    """Beyond `body_seconds`; both are the defaults of Apache's mod_reqtimeout."""
    refused_seconds: float = 5.0
    """How long the rest of a body is read that was answered before its end."""
    unread_seconds: float = 60.0
    """How long a client may take none of an answer that waits for it."""


class Connection(Protocol):
    """One connection as the registry sees it."""

    def end_if_late(self, now: float) -> None:
        """Close it if it takes too long over something."""

    def abort(self) -> None:
        """Close it now."""


class Connections:
    """All connections of a server; used in its event loop alone."""

    def __init__(
        self, limits: ConnectionLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin with none. `clock` returns seconds."""
        self.limits, self.clock = limits, clock
        self._all: set[Connection] = set()
        # In the order in which they are closed for others.
        self._strangers: dict[Connection, None] = {}
        self._waiting: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: Connection) -> None:
        """Take on a new connection; closes another one, or this one, at the bound."""
        self._all.add(connection)
        self._strangers[connection] = None
        if len(self._all) > self.limits.connections:
            first = next(iter(self._strangers))
            if first is connection:
                first = next(iter(self._waiting), connection)
            self.remove(first)
            first.abort()

    def remove(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        self._all.discard(connection)
        self._strangers.pop(connection, None)
        self._waiting.pop(connection, None)

    def admit(self, connection: Connection) -> None:
        """Note that it has shown a key, where one is needed."""
        if connection in self._all:
            self._strangers.pop(connection, None)

    def note_waiting(self, connection: Connection, *, is_waiting: bool) -> None:
        """Note whether a request of a connection is being answered, or the client's is awaited."""
        self._waiting.pop(connection, None)
        if is_waiting and connection in self._all and connection not in self._strangers:
            self._waiting[connection] = None

    def sweep(self) -> None:
        """Close what takes too long."""
        now = self.clock()
        for connection in list(self._all):
            connection.end_if_late(now)

    async def watch(self) -> None:
        """Sweep again and again, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self.sweep()


def most_connections() -> int:
    """Return how many connections this process has file descriptors for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    room = (soft - len(os.listdir("/proc/self/fd")) - _OWN_DESCRIPTORS) * 4 // 5
    return max(_FEWEST_CONNECTIONS, min(_MOST_CONNECTIONS, room))


def accepted_at_once(connections: int) -> int:
    """Return how many are accepted at a time, where there may be so many.

    Until one is closed for another the loop accepts four times: the fifth that is left.
    """
    return max(1, connections // 16)

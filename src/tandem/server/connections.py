"""Limits for one connection, and for the number of connections."""

import os
import resource
from dataclasses import dataclass

_MOST_CONNECTIONS = 1024
_FEWEST_CONNECTIONS = 8
# File descriptors for anything but connections: engine process, helpers, files.
_OWN_DESCRIPTORS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits for one connection, and for the number of connections."""

    connections: int = _MOST_CONNECTIONS
    head_bytes: int = 64 << 10
    headers: int = 100
    """The most headers of a request; the default is that of Apache's LimitRequestFields."""
    pipelined: int = 16
    """The most requests that a client may send before an earlier request is answered."""
    head_seconds: float = 20.0
    """The longest pause before a request; the request's head may then take as long again."""
    body_seconds: float = 20.0
    body_bytes_per_second: float = 500.0
    """A body's time limit is `body_seconds` at first, and grows by one second each time that
    this many bytes are received. Both defaults are those of Apache's mod_reqtimeout."""
    refused_seconds: float = 5.0
    """Seconds to receive the rest of a body that was answered before its end."""
    unread_seconds: float = 60.0
    """The longest time that a client may leave an answer unread."""


def most_connections() -> int:
    """Return how many connections the process's file descriptors allow, from 8 to 1024."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    room = (soft - len(os.listdir("/proc/self/fd")) - _OWN_DESCRIPTORS) * 4 // 5
    return max(_FEWEST_CONNECTIONS, min(_MOST_CONNECTIONS, room))


def accepted_at_once(connections: int) -> int:
    """Return how many connections to accept at a time, if at most `connections` are allowed.

    The event loop may accept four times as many before an old connection is closed to make room.
    `most_connections` keeps one fifth of the descriptors free for these extra connections.
    """
    return max(1, connections // 16)

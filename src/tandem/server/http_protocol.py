"""HTTP/1.1 as uvicorn speaks it, with limits on everything before a request is complete.

uvicorn itself limits only the pause between two requests; with httptools it limits no header sizes.

A client costs a file descriptor and some memory before it has shown a key. So the number of
connections is limited to fewer than the process's file descriptors. At the limit, a new connection
closes the oldest connection without a key; if every connection has shown a key, it closes the
connection that has waited longest between two requests. A connection whose request with a key is
being answered is never closed for another connection.

Every wait for a client has a time limit: a head, a body, the pause between requests, an answer that
is not read. A body's limit grows with its length, so that slow honest clients are served.

One `BoundedHttp` is one connection. The parser may be in a head, in a body or between two requests.
Meanwhile the application may be answering one request, while others on the connection wait.
"""

import asyncio
import contextlib
import enum
import json
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tandem.apis.errors import ApiError
from tandem.server.connections import ConnectionLimits

ADMIT = "tandem.admit"
"""The scope extension whose "call" marks the connection as authenticated."""

_SWEEP_SECONDS = 1.0
# Extra bytes that chunks may add per byte of a body. Chunks of one byte add five.
_CHUNK_OVERHEAD = 8


class _Parsing(enum.Enum):
    """What the parser of a connection is reading; the values are words of error messages."""

    PAUSE = "the pause between requests"
    HEAD = "a head"
    BODY = "a body"


class Connections:
    """All connections of a server; used in its event loop only."""

    def __init__(
        self,
        limits: ConnectionLimits,
        clock: Callable[[], float] = time.monotonic,
        answer_at_once: Callable[[Mapping[str, Any]], bytes | None] = lambda scope: None,
    ) -> None:
        """Start without connections. `clock` returns seconds.

        `answer_at_once` gets a request's scope; it returns the answer as JSON, or None if the
        application must answer.
        """
        self.limits, self.clock, self.answer_at_once = limits, clock, answer_at_once
        self._all: set[BoundedHttp] = set()
        # In the order in which they are closed to make room.
        self._strangers: dict[BoundedHttp, None] = {}
        self._waiting: dict[BoundedHttp, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: "BoundedHttp") -> None:
        """Add a new connection; at the limit, close another connection or the new one."""
        self._all.add(connection)
        self._strangers[connection] = None
        if len(self._all) > self.limits.connections:
            first = next(iter(self._strangers))
            if first is connection:
                first = next(iter(self._waiting), connection)
            self.remove(first)
            first.abort()

    def remove(self, connection: "BoundedHttp") -> None:
        """Forget a connection that has ended, or that is about to be closed."""
        self._all.discard(connection)
        self._strangers.pop(connection, None)
        self._waiting.pop(connection, None)

    def admit(self, connection: "BoundedHttp") -> None:
        """Record that a connection has shown a valid key, or needs none."""
        if connection in self._all:
            self._strangers.pop(connection, None)

    def note_waiting(self, connection: "BoundedHttp", *, is_waiting: bool) -> None:
        """Record whether a connection waits for its client; otherwise the server is answering."""
        self._waiting.pop(connection, None)
        if is_waiting and connection in self._all and connection not in self._strangers:
            self._waiting[connection] = None

    def sweep(self) -> None:
        """Close connections whose clients exceed a time limit."""
        now = self.clock()
        for connection in list(self._all):
            connection.end_if_late(now)

    async def watch(self) -> None:
        """Call `sweep` repeatedly, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self.sweep()


class BoundedHttp(HttpToolsProtocol):
    """One connection; it is closed when it exceeds a limit of size or time."""

    def __init__(self, connections: Connections, **uvicorns: Any) -> None:
        """Register with `connections`; uvicorn supplies the other arguments."""
        super().__init__(**uvicorns)
        self._connections, self._limits = connections, connections.limits
        self._parsing = _Parsing.PAUSE
        self._num_open = 0  # requests with an unfinished answer
        self._num_headers = self._fed_bytes = self._body_bytes = self._chunk_bytes = 0
        self._problem: ApiError | None = None
        self._at_once: bytes | None = None
        self._is_first_of_read = self._ends_head_of_first = False
        self._since = self._late = 0.0
        self._unsent_bytes, self._unsent_since = 0, 0.0

    # ---- the connection --------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Add this connection to `Connections`, which may close a connection to make room."""
        super().connection_made(transport)
        self._allow(self._limits.head_seconds)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove this connection from `Connections`."""
        self._connections.remove(self)
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def end_if_late(self, now: float) -> None:
        """Close the connection if its client exceeds a time limit."""
        if self._is_stuck(now):
            self.abort()
        elif now < self._late or self.transport.is_closing():
            return
        elif self._parsing is _Parsing.PAUSE:
            if not self._num_open:
                self.transport.close()
        elif not self.flow.read_paused:  # otherwise it is the server that does not read
            seconds = now - self._since
            what = self._parsing.value
            self._end(ApiError(408, f"{what} did not end within {seconds:.0f} seconds"))

    def _is_stuck(self, now: float) -> bool:
        """Tell whether data wait to be sent and the client has read none for `unread_seconds`."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent < self._unsent_bytes or not self._unsent_bytes:
            self._unsent_since = now
        self._unsent_bytes = unsent
        return unsent > 0 and now - self._unsent_since >= self._limits.unread_seconds

    def _allow(self, seconds: float) -> None:
        """Give the client `seconds` for what it must do next: send a request, a head or a body."""
        self._since = self._connections.clock()
        self._late = self._since + seconds

    def _end(self, error: ApiError) -> None:
        """Send an error, unless it would mix with an answer, and close the connection."""
        if self._num_open and (self.cycle is None or self.cycle.response_started or self.pipeline):
            self.abort()
            return
        body = json.dumps(error.body).encode()
        head = (
            b"HTTP/1.1 %d %b\r\nconnection: close\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n"
            % (error.status, HTTPStatus(error.status).phrase.encode(), len(body))
        )
        self.transport.write(head + body)
        self.transport.close()

    # ---- receiving -------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; then end the connection if they exceed a limit of size."""
        self._fed_bytes += len(data)
        self._chunk_bytes = len(data)
        self._is_first_of_read = True
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._parsing is not _Parsing.BODY and self._fed_bytes > self._limits.head_bytes:
            self._end(self._too_large())
        elif self._parsing is _Parsing.BODY:
            overhead_bytes = self._fed_bytes - self._body_bytes
            if overhead_bytes > 2 * self._limits.head_bytes + _CHUNK_OVERHEAD * self._body_bytes:
                self._end(ApiError(400, "the body's chunks and trailers are longer than the body"))
            self._late = max(
                self._late,
                self._since
                + self._limits.body_seconds
                + self._body_bytes / self._limits.body_bytes_per_second,
            )

    def _too_large(self) -> ApiError:
        limits = self._limits
        return ApiError(
            431,
            f"the request's head is larger than {limits.head_bytes} bytes or {limits.headers} "
            "headers; send less",
        )

    def on_message_begin(self) -> None:
        """Begin a new request: reset the header counters and the time limit."""
        super().on_message_begin()
        if self._num_open > self._limits.pipelined:
            self._refuse(ApiError(400, "too many requests were sent before one was answered"))
        self.scope["extensions"] = {ADMIT: {"call": self._admit}}
        self._parsing = _Parsing.HEAD
        self._num_headers = self._body_bytes = 0
        # Bytes of the chunk in which the head begins, without earlier bodies.
        self._fed_bytes = self._chunk_bytes
        self._allow(self._limits.head_seconds)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header or a trailer, and add it to the request."""
        self._num_headers += 1
        if self._num_headers > self._limits.headers:
            self._refuse(self._too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Pass the request to the application."""
        self._ends_head_of_first, self._is_first_of_read = self._is_first_of_read, False
        super().on_headers_complete()
        self._ends_head_of_first = False
        self._parsing = _Parsing.BODY
        self._num_open += 1
        self._allow(self._limits.body_seconds)

    def on_body(self, body: bytes) -> None:
        """Count a part of a body, and add it to the request."""
        self._body_bytes += len(body)
        self._chunk_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that a request has arrived whole; its answer may have been sent already."""
        super().on_message_complete()
        self._parsing = _Parsing.PAUSE
        self._fed_bytes = 0
        self._allow(self._limits.head_seconds)
        self._connections.note_waiting(self, is_waiting=not self._num_open)
        if self._at_once is not None:
            self._send_at_once(self._at_once)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Start the application for a request, unless `answer_at_once` answers it.

        An answer at once saves a turn of the event loop. At most one request of each read from the
        socket is answered so; otherwise, a client that sends many requests together would delay
        other clients.
        """
        if self._ends_head_of_first and not self.flow.write_paused:
            self._at_once = self._connections.answer_at_once(cycle.scope)
        if self._at_once is None:
            super()._start_asgi_task(cycle, app)

    def _send_at_once(self, body: bytes) -> None:
        self._at_once = None
        kind, length = (b"content-type", b"application/json"), str(len(body)).encode()
        headers = [(b"content-length", length), kind]
        messages: tuple[Any, ...] = (
            {"type": "http.response.start", "status": 200, "headers": headers},
            {"type": "http.response.body", "body": body},
        )
        for message in messages:
            with contextlib.suppress(StopIteration):  # the coroutine awaits nothing
                self.cycle.send(message).send(None)

    def _refuse(self, error: ApiError) -> None:
        """Stop the parser by an exception, after which uvicorn calls `send_400_response`."""
        self._problem = error
        raise httptools.HttpParserError(str(error))

    def send_400_response(self, msg: str) -> None:
        """Answer a request that could not be parsed, and say what was wrong."""
        self._end(self._problem or ApiError(400, "this is not an HTTP/1.1 request"))

    # ---- sending ---------------------------------------------------------------------------------

    def _admit(self) -> None:
        self._connections.admit(self)
        self._connections.note_waiting(self, is_waiting=self._parsing is not _Parsing.PAUSE)

    def on_response_complete(self) -> None:
        """Set the time limit for the next request, or for the rest of this request's body."""
        self._num_open -= 1
        super().on_response_complete()
        if self._num_open == 0:
            is_rest = self._parsing is _Parsing.BODY
            limits = self._limits
            self._allow(limits.refused_seconds if is_rest else limits.head_seconds)
            self._connections.note_waiting(self, is_waiting=True)

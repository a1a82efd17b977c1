"""A server in a thread of this process, with its own application, limits and clock."""

import asyncio
import contextlib
import functools
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send

from tandem.server.connections import ConnectionLimits
from tandem.server.gate import SignOfLife
from tandem.server.http_protocol import ADMIT, BoundedHttp, Connections

PATIENCE_SECONDS = 60
KEY = b"key"


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Admit requests with the key. /long never ends, /large is 50 MB, others return a length."""
    if dict(scope["headers"]).get(b"x-key") == KEY:
        scope["extensions"][ADMIT]["call"]()
    path = scope["path"]
    num_bytes, message = 0, {"more_body": path != "/early"}
    while message.get("more_body"):
        message = dict(await receive())
        if message["type"] == "http.disconnect":
            return
        num_bytes += len(message["body"])
    text = b"x" * 50_000_000 if path == "/large" else str(num_bytes).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if path == "/long":
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        return
    await send({"type": "http.response.body", "body": text})


class BoundedServer:
    """A running server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.now = 0.0
        self.connections = Connections(limits, lambda: self.now, SignOfLife({"x"}))
        config = uvicorn.Config(
            application, http=functools.partial(BoundedHttp, self.connections),  # type: ignore[arg-type]
            log_config=None, lifespan="off", ws="none",
        )  # fmt: skip
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.uvicorn = uvicorn.Server(config)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.loop.run_until_complete(self.uvicorn._serve([self.listener]))
        self.loop.close()

    def do(self, function: Callable[[], Any]) -> Any:
        """Call a function in the event loop."""

        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(PATIENCE_SECONDS)

    def pass_time(self, seconds: float) -> None:
        """Advance the connections' clock and check them."""
        self.now += seconds
        self.do(self.connections.sweep)

    def count(self) -> int:
        return int(self.do(lambda: len(self.connections)))

    def wait_for(self, function: Callable[[], Any], value: Any) -> None:
        """Wait until a function returns a value; data is seen later than it was sent."""
        event = threading.Event()
        for _ in range(PATIENCE_SECONDS * 100):
            if (found := self.do(function)) == value:
                return
            event.wait(0.01)
        raise AssertionError(f"{found}, expected {value}")

    def wait_for_count(self, number: int) -> None:
        self.wait_for(lambda: len(self.connections), number)

    def wait_for_bytes(self, number: int, of: str = "_fed_bytes") -> None:
        """Wait until this many bytes of the current requests have arrived."""
        self.wait_for(lambda: sum(getattr(one, of) for one in self.connections._all), number)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname(), PATIENCE_SECONDS)


@contextlib.contextmanager
def bounded_server(**limits: Any) -> Iterator[BoundedServer]:
    server = BoundedServer(ConnectionLimits(**limits))
    server.thread.start()
    try:
        yield server
    finally:
        server.uvicorn.should_exit = server.uvicorn.force_exit = True
        server.thread.join()
        server.listener.close()


def answer(connection: socket.socket) -> bytes:
    """Return everything until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            found += data
    return found


def one_answer(connection: socket.socket) -> bytes:
    """Return a chunked answer on a connection that stays open."""
    found = b""
    while not found.endswith(b"0\r\n\r\n"):
        data = connection.recv(1 << 16)
        assert data, found
        found += data
    return found

"""Tests of difficult clients: slow readers, half-open connections, hundreds, disconnects."""

import contextlib
import json
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import RunningServer, running_server

MANY = 300


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 30)


def request(max_tokens: int, *, stream: bool) -> bytes:
    messages = [{"role": "user", "content": "hello"}]
    fields = {"messages": messages, "max_tokens": max_tokens, "stream": stream}
    body = json.dumps(fields).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    kind = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head + kind + body


@contextlib.contextmanager
def unkind(server: RunningServer, kind: str) -> Iterator[None]:
    """Open connections of one difficult kind, and leave them open."""
    with contextlib.ExitStack() as stack:
        if kind == "idle":
            for _ in range(MANY):
                stack.enter_context(connect(server))
        elif kind == "half a request":
            for number in range(MANY):
                connection = stack.enter_context(connect(server))
                connection.sendall(request(5, stream=False)[: 20 + number % 150])
        elif kind == "slow reader":
            for _ in range(2):
                connection = stack.enter_context(connect(server))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.sendall(request(20_000, stream=True))
                connection.recv(100)
        elif kind == "huge headers":
            for _ in range(20):
                connection = stack.enter_context(connect(server))
                with contextlib.suppress(ConnectionError):
                    connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * 300_000)
        else:
            for number in range(20):
                with connect(server) as connection:
                    connection.sendall(request(20_000, stream=number % 2 == 0))
        yield


@pytest.mark.parametrize(
    "kind", ["idle", "half a request", "slow reader", "huge headers", "leaves in the middle"]
)
def test_streams_of_others_are_unhurt(server: RunningServer, kind: str) -> None:
    fields: dict[str, Any] = {"max_tokens": 30, "temperature": 0}
    alone = server.chat(**fields).text
    with unkind(server, kind):
        for _ in range(2):
            assert server.chat(**fields, stream=True).streamed_texts == [alone]
    server.wait_for("tandem_requests_running", 0)
    assert "Traceback" not in server.log


def test_idle_connections_leave_descriptors_for_the_owner(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """With a limit of 256 files, 300 connections without a key once took all of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        serving = running_server(tiny_checkpoint, cache=tmp_path, TANDEM_API_KEY="secret")
        server = serving.__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with contextlib.ExitStack() as stack:
        stack.push(serving)
        for number in range(MANY):
            connection = stack.enter_context(connect(server))
            if number % 2:
                connection.sendall(b"GET /v1/models HTTP/1.1\r\n")
        assert server.ask("GET", "/health").status == 200
        assert server.chat(max_tokens=2).status == 200
    assert "out of system resource" not in server.log

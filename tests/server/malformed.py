"""Malformed requests: bytes that are not HTTP, wrong HTTP, JSON that is not a request."""

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

from tests.server.running import RunningServer

_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_HELLO: Any = [{"role": "user", "content": "x"}]
_PATIENCE_SECONDS = 30


def _post(headers: bytes, body: bytes = b"", path: str = _CHAT) -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n%s\r\n%s" % (
        path.encode(), headers, body,
    )  # fmt: skip


def _get(path: bytes, headers: bytes = b"Host: localhost\r\n") -> bytes:
    return b"GET %s HTTP/1.1\r\n%sConnection: close\r\n\r\n" % (path, headers)


def raw_requests() -> Iterator[bytes]:
    """Yield bytes that violate or strain HTTP."""
    yield b"\r\n\r\n"
    yield b"hello\r\n\r\n"
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 60  # TLS
    yield b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    yield b"GET /\r\n\r\n"
    yield b"BREW / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    yield b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n"
    yield _get(b"/v1/models", b"")  # no host
    yield _get(b"/v1/models", b"Host: evil.example\r\n")
    yield _get(b"/v1/models", b"Host: localhost\r\nBad\0Name: 1\r\n")
    yield _get(b"/v1/models", b"Host: localhost\r\nX: " + b"a" * 100_000 + b"\r\n")
    yield _get(b"/v1/models", b"Host: localhost\r\n" + b"X-Y: 1\r\n" * 5_000)
    yield _get(b"/v1/models", b"Host: localhost\r\nAuthorization: Bearer \xff\xfe\r\n")
    for path in (
        b"/" + b"a" * 10_000, b"/%00", b"/\xff", b"/../../etc/passwd", b"//etc/passwd", b"/%zz",
        b"/page.css/../../options.py", b"/v1/models/..%2f..%2fconfig.json", b"http://evil.example/",
        b"*", b"/v1/models?" + b"q=1&" * 3_000, b"/live/../metrics",
    ):  # fmt: skip
        yield _get(path)
    yield _get(b"/live", b"Host: localhost\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                         b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n")  # fmt: skip
    body = json.dumps({"messages": _HELLO, "max_tokens": 1}).encode()
    size = b"Content-Length: %d\r\n" % len(body)
    yield _post(b"Content-Length: -1\r\n", body)
    yield _post(b"Content-Length: x\r\n", body)
    yield _post(b"Content-Length: 99999999999999999999\r\n", body)
    yield _post(size + b"Content-Length: 3\r\n", body)
    yield _post(size + b"Transfer-Encoding: chunked\r\n", body)
    yield _post(b"Content-Length: 100000\r\n", body)  # and then nothing: the client hangs up
    yield _post(b"Transfer-Encoding: chunked\r\n", b"zz\r\n" + body)
    yield _post(b"Transfer-Encoding: chunked\r\n", b"-5\r\nhello\r\n0\r\n\r\n")
    yield _post(b"Transfer-Encoding: chunked\r\n", b"ffffffffffffffffff\r\nx")
    yield _post(b"Transfer-Encoding: gzip\r\n", body)
    yield _post(b"Content-Encoding: gzip\r\n" + size, body)
    yield _post(b"Transfer-Encoding: chunked\r\n", b"100000\r\n" + b" " * 0x100000 + b"\r\n" * 9)


def _values() -> Iterator[dict[str, Any]]:
    """Yield request fields that are invalid or ask for too much."""
    deep: Any = 0
    for _ in range(200):
        deep = {"type": "array", "items": deep} if deep else {"type": "null"}
    schemas: list[Any] = [
        {"$ref": "#"}, {"$ref": "#/nowhere"}, {"$ref": "https://evil.example/schema"},
        {"type": "string", "pattern": "("}, {"type": "string", "pattern": "(a+)+$"},
        {"type": "string", "pattern": "a{1,100000}"}, {"enum": []}, {"enum": list(range(5000))},
        {"type": "string", "minLength": 10**9}, {"minimum": 1, "maximum": 0, "type": "integer"},
        {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"not": {}}, {"type": []}, deep,
        {"properties": {"x": True}, "required": ["y"]}, {"x-guidance": {"lenient": 5}},
    ]  # fmt: skip
    for schema in schemas:
        yield {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        yield {"tools": [tool]}
        yield {"tools": [tool], "tool_choice": "required"}
    values: dict[str, list[Any]] = {
        "model": [5, "x" * 600], "max_tokens": [0, -2, 1.5, "9", 2**40, True, []],
        "temperature": [-1, 9, "1", {}], "top_p": [-0.1, 1.1], "top_k": [-2, 2**40],
        "n": [0, 10**9], "stop": ["", 5, [""], ["a"] * 17, "x" * 300], "seed": [2**70, 1.5, "1"],
        "stream": ["yes", 1], "stream_options": [5, {"x": 1}], "logprobs": ["x", 99, -1],
        "top_logprobs": [21, -1], "logit_bias": [{"-1": 1}, {"1": 1000}, {"1": None}, [1]],
        "metadata": [{"a": 1}, "x"], "tool_choice": ["some", {"type": "function"}, 5],
        "tools": [{}, [{}], [{"type": "function", "function": {"name": "a b"}}]],
        "chat_template_kwargs": [{"messages": []}, {"a b": 1}, {"x": deep}, 5],
        "response_format": ["json", {"type": "xml"}], "reasoning_effort": ["huge"],
    }  # fmt: skip
    for name, wrong in values.items():
        yield from ({name: value} for value in wrong)


def _messages() -> Iterator[Any]:
    """Yield invalid conversations."""
    yield from ([], {}, "x", None, [None], [[]], [{}], [{"role": "user"}, 5])
    yield [{"role": "wizard", "content": "x"}]
    yield [{"role": "user", "content": [{"type": kind}]} for kind in ("image_url", "text", "", 5)]
    yield [{"role": "user", "content": "x" * 100_000}]
    yield [{"role": "user", "content": "\0\u202e\ufffe" * 9}]
    yield [{"role": "tool", "content": "x"}]
    yield [{"role": "assistant", "tool_calls": [{"id": "", "function": {"name": "", "arguments":
            "[" * 9999}}]}]  # fmt: skip
    yield _HELLO * 5000


def bodies() -> Iterator[tuple[str, bytes]]:
    """Yield (path, body) of valid HTTP requests with invalid bodies."""
    for path in (_CHAT, _TEXT):
        for body in (
            b"", b"{", b"[]", b"null", b"1e999", b'"x"', b"\xff\xfe{\0}\0", b"\xef\xbb\xbf{}",
            b"[" * 100_000, b'{"a":' * 50_000, b'{"max_tokens": NaN}',
            b'{"seed": 1%s}' % (b"0" * 5000),
            b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"prompt": "\\udfff"}',
            b'{"prompt": "a", "prompt": ["b", 5]}',
        ):  # fmt: skip
            yield path, body
        for fields in _values():
            fields = {
                "max_tokens": 1,
                **({"messages": _HELLO} if path == _CHAT else {"prompt": "x"}),
            }
            yield path, json.dumps({**fields, **fields}).encode()
    for messages in _messages():
        yield _CHAT, json.dumps({"messages": messages, "max_tokens": 1}).encode()
    prompts: list[Any] = [
        "", [], [[]], [""], [5, "x"], [-1], [2**40], [True], [1.5], [[1], "x"], {}, 5, None,
        [[1]] * 65, "x" * 100_000,
    ]  # fmt: skip
    for prompt in prompts:
        yield _TEXT, json.dumps({"prompt": prompt, "max_tokens": 1}).encode()


def status_of(server: RunningServer, request: bytes) -> int | None:
    """Send bytes, close our side, and return the answer's status; None: there was none."""
    with socket.create_connection(("127.0.0.1", server.port), _PATIENCE_SECONDS) as connection:
        answer = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            while len(answer) < 16 and (data := connection.recv(1 << 16)):
                answer += data
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else None


def send_all(server: RunningServer) -> tuple[int, list[str]]:
    """Send everything; return the number of requests, and what was wrong with the answers."""
    problems, number = [], 0
    for request in raw_requests():
        number += 1
        status = status_of(server, request)
        if status is not None and status >= 500:
            problems.append(f"{status} for {request[:80]!r}")
    for path, body in bodies():
        number += 1
        reply = server.ask("POST", path, body)
        # Some of them are answered: unusual requests need not be wrong.
        if reply.status >= 500 or (reply.status != 200 and "message" not in reply.error):
            problems.append(f"{reply.status} for {path} {body[:200]!r}")
    if server.chat(max_tokens=2).status != 200:
        problems.append("the server does not answer any more")
    return number, problems

"""Requests of hostile clients, by kind; `hostile` runs two hundred of them repeatedly."""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

_MESSAGES = [{"role": "user", "content": "hello"}]
_PAUSE_SECONDS = 0.2
_ANSWER_SECONDS = 30.0
_LORIS_SECONDS = 0.5

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_SCHEMAS: tuple[object, ...] = (
    {"type": "integer", "multipleOf": 499979},
    {"enum": [f"{number:06} and {'more ' * 8}" for number in range(60_000)]},
    {"type": "string", "pattern": "(a|b)*a(a|b){18}"},
    {"properties": {f"property{number}": {"type": "string"} for number in range(5000)}},
)


@dataclass(slots=True)
class Target:
    """The server, and the statuses of its answers."""

    port: int
    key: str
    statuses: Counter[str] = field(default_factory=Counter)

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Connect; close at once at the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    def head(self, path: str, num_bytes: int, *, key: str | None = None) -> bytes:
        """Return the head of a request with a body."""
        return (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {key or self.key}\r\nContent-Length: {num_bytes}\r\n\r\n"
        ).encode()

    async def status(self, kind: str, reader: asyncio.StreamReader) -> None:
        """Read and count the status, if any."""
        async with asyncio.timeout(_ANSWER_SECONDS):
            words = (await reader.readline()).split()
        self.statuses[f"{kind}: {words[1].decode() if len(words) > 1 else 'closed'}"] += 1

    async def post(
        self, kind: str, path: str, body: object, *, key: str | None = None, waits: bool = True
    ) -> None:
        """Send a body, as JSON unless it is bytes; read the status, or leave at once."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.connection() as (reader, writer):
            writer.write(self.head(path, len(raw), key=key) + raw)
            await writer.drain()
            if waits:
                await self.status(kind, reader)


async def _idle(target: Target, kind: str) -> None:
    async with target.connection() as (reader, _):
        await target.status(kind, reader)


async def _slow_head(target: Target, kind: str) -> None:
    async with target.connection() as (_, writer):
        writer.write(b"GET /health HTTP/1.1\r\n")
        while True:
            writer.write(b"A: b\r\n")
            await writer.drain()
            await asyncio.sleep(_LORIS_SECONDS)


async def _slow_body(target: Target, kind: str) -> None:
    async with target.connection() as (_, writer):
        writer.write(target.head("/v1/chat/completions", 1 << 20))
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(_LORIS_SECONDS)


async def _large_head(target: Target, kind: str) -> None:
    async with target.connection() as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nX: " + b"a" * (4 << 20))
        await target.status(kind, reader)


async def _comes_and_goes(target: Target, kind: str) -> None:
    async with target.connection():
        pass


async def _reads_nothing(target: Target, kind: str) -> None:
    body = json.dumps({"messages": _MESSAGES, "stream": True, "max_tokens": 64}).encode()
    async with target.connection() as (_, writer):
        writer.write(target.head("/v1/chat/completions", len(body)) + body)
        await asyncio.sleep(10 * _LORIS_SECONDS)


async def _many_in_one(target: Target, kind: str) -> None:
    async with target.connection() as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5000)
        await target.status(kind, reader)


def _posting(
    path: str, make: Callable[[], object], *, key: str | None = None, waits: bool = True
) -> Callable[[Target, str], Awaitable[None]]:
    async def post(target: Target, kind: str) -> None:
        await target.post(kind, path, make(), key=key, waits=waits)

    return post


_CHAT, _TEXT, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_LISTS = b'{"prompt": "x", "other": [' + b"[]," * 1_000_000 + b"1]}"
_DEEP = b'{"messages": ' + b"[" * 1_000_000
_WRONG = json.dumps({"input": [{"a": 1}] * 33_000}).encode()
_SPACES = json.dumps({"prompt": " " * 3_500_000}).encode()
_WORDS = json.dumps({"prompt": "so it goes " * 3000, "max_tokens": 1}).encode()
_TOOLS = [{"type": "function", "name": f"f{n}", "parameters": {"enum": [[]] * 200}}
          for n in range(64)]  # fmt: skip

KINDS: dict[str, Callable[[Target, str], Awaitable[None]]] = {
    "idle": _idle,
    "slow head": _slow_head,
    "slow body": _slow_body,
    "large head": _large_head,
    "comes and goes": _comes_and_goes,
    "reads nothing": _reads_nothing,
    "many in one": _many_in_one,
    "wrong key": _posting(_CHAT, lambda: {"messages": _MESSAGES}, key="wrong"),
    "wrong key, large body": _posting(_CHAT, lambda: b"x" * (3 << 20), key="wrong"),
    "too large": _posting(_CHAT, lambda: b"x" * (6 << 20)),
    "no JSON": _posting(_CHAT, lambda: b"{" + random.randbytes(1000)),
    "deep JSON": _posting(_CHAT, lambda: _DEEP),
    "many values": _posting(_TEXT, lambda: _LISTS),
    "wrong elements": _posting(_RESPONSES, lambda: _WRONG),
    "long text": _posting(_TEXT, lambda: _SPACES),
    "long prompt": _posting(_TEXT, lambda: _WORDS),
    "1,024 prompts": _posting(_TEXT, lambda: {"prompt": ["x"] * 1024, "n": 16, "max_tokens": 1}),
    "16 choices, leaves": _posting(
        _CHAT, lambda: {"messages": _MESSAGES, "n": 16, "max_tokens": 500}, waits=False
    ),
    "a stream, leaves": _posting(
        _CHAT, lambda: {"messages": _MESSAGES, "stream": True, "max_tokens": 500}, waits=False
    ),
    "large tools": _posting(
        _RESPONSES, lambda: {"input": "x", "max_output_tokens": 1, "tools": _TOOLS}
    ),
}
_PATTERN = {"properties": {"x": {"type": "string", "pattern": "(a|b)*a(a|b){18}"}}}
_PATTERNS = [{"type": "function", "function": {"name": f"f{n}", "parameters": _PATTERN}}
             for n in range(60)]  # fmt: skip
SCHEMA_KINDS: dict[str, Callable[[Target, str], Awaitable[None]]] = {
    "schema": _posting(
        _TEXT,
        lambda: {"prompt": "x", "max_tokens": 4, "json_schema": random.choice(_SCHEMAS)},
    ),
    "patterns": _posting(
        _CHAT, lambda: {"messages": _MESSAGES, "max_tokens": 4, "tools": _PATTERNS}
    ),
}


async def attack(target: Target, kind: str, send: Callable[[Target, str], Awaitable[None]]) -> None:
    """Act as one hostile client until cancelled."""
    while True:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            await send(target, kind)
        await asyncio.sleep(random.uniform(0, _PAUSE_SECONDS))

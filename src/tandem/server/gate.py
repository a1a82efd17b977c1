"""What every request passes first: host, origin, key, kind and size of its body.

A page of another site must not reach a server on the same machine: its script cannot send JSON
without being asked by CORS, which is off, and a name that it made point here is not ours.
"""

import json
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.apis.errors import ApiError
from tandem.server.api_keys import OWNER, ApiKeys
from tandem.server.http_protocol import ADMIT
from tandem.server.page_files import PAGE_FILES
from tandem.server.refusals import log_refusal

_OPEN_PATHS = {*PAGE_FILES, "/health", "/ready", "/favicon.ico"}
_LONGEST_PATH = 2048
_ENDLESS_PATH = "/live"
# Of a server that does not count connections.
_UNCOUNTED = {"call": lambda: None}


class _TooLargeError(Exception):
    """The body went over the limit while it came."""


class Gate:
    """Lets through what may pass, with an error in its API's form for the rest."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str],
        allowed_hosts: list[str] | None,
        max_body_bytes: int,
        allow_origin: str | None,
    ) -> None:
        """Guard `app`; no keys, and None, switch a check off."""
        self._app = app
        self._keys = ApiKeys(api_keys)
        self._hosts = None if allowed_hosts is None else set(allowed_hosts)
        self._max_body_bytes = max_body_bytes
        self._origin = None if allow_origin is None else allow_origin.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and pass it on."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD" and scope["path"] != _ENDLESS_PATH:
            scope = {**scope, "method": "GET"}  # the HTTP server sends the headers alone
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self._origin is not None:
            send = _with_headers(send, self._cors())
            if scope["method"] == "OPTIONS":
                await _reply(send, 204, b"", ())
                return
        owner = self._keys.owner(headers)
        problem = self._problem(scope, headers, owner)
        if problem is not None:
            await _refuse(scope, send, problem)
            return
        if scope["path"] not in _OPEN_PATHS:
            scope.get("extensions", {}).get(ADMIT, _UNCOUNTED)["call"]()
        scope.setdefault("state", {})[OWNER] = owner or b""
        began = [False]
        try:
            await self._app(scope, self._bounded(receive), _noting(send, began))
        except _TooLargeError:
            if not began[0]:
                await _refuse(scope, send, self._too_large())

    def _problem(
        self, scope: Scope, headers: dict[bytes, bytes], owner: bytes | None
    ) -> ApiError | None:
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if self._hosts is not None and name not in self._hosts:
            return ApiError(403, "this server is called by its own address only", code="bad_host")
        if len(scope["path"]) > _LONGEST_PATH:
            return ApiError(414, "the path is too long")
        if scope["path"] not in _OPEN_PATHS and owner is None:
            return ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY or "
                "x-api-key: KEY",
                code="invalid_api_key",
            )
        if scope["method"] == "POST":
            return self._body_problem(headers)
        return None

    def _body_problem(self, headers: dict[bytes, bytes]) -> ApiError | None:
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            return ApiError(415, "the body must be JSON, sent with Content-Type: application/json")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than {self._max_body_bytes} bytes; send less, or start the "
            "server with a larger --max-body",
        )

    def _bounded(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise _TooLargeError
            return message

        return bounded

    def _cors(self) -> tuple[tuple[bytes, bytes], ...]:
        assert self._origin is not None
        return (
            (b"access-control-allow-origin", self._origin),
            (
                b"access-control-allow-headers",
                b"authorization, content-type, x-api-key, anthropic-version",
            ),
            (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
            (b"vary", b"origin"),
        )


def _noting(send: Send, began: list[bool]) -> Send:
    async def noting(message: Message) -> None:
        began[0] = True
        await send(message)

    return noting


def _with_headers(send: Send, headers: Iterable[tuple[bytes, bytes]]) -> Send:
    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *headers]
        await send(message)

    return with_headers


async def _refuse(scope: Scope, send: Send, error: ApiError) -> None:
    log_refusal(scope, error)
    headers = [(b"content-type", b"application/json")]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await _reply(send, error.status, json.dumps(error.body_for(scope["path"])).encode(), headers)


async def _reply(
    send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]
) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})

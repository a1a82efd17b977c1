"""Checks every request before the application: host, key, content type and size of its body.

A page of another site must not reach a server on the same machine, in any of three ways. A script
of the page cannot send JSON without a CORS request, which is refused. If the site points its own
host name at this machine, that name is not one of the server's, and the request is refused. A body
of another content type is refused. Only a program's body may lack the type, or have the type that
curl sends for any body: its request has none of the headers by which a browser names the page.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.apis.errors import ApiError
from tandem.server.api_keys import OWNER, ApiKeys
from tandem.server.http_protocol import ADMIT
from tandem.server.page_files import PAGE_FILES
from tandem.server.refusals import refusal

# Content types that curl sends for any body.
_UNSAID = {b"", b"application/x-www-form-urlencoded"}
# Headers in which a browser names the page that sends the request.
_OF_PAGES = {b"origin", b"referer", b"sec-fetch-site"}
_OPEN_PATHS = {*PAGE_FILES, "/health", "/ready", "/favicon.ico"}
HEALTHY = b'{"status":"ok"}'
"""The answer of `/health`."""
_LONGEST_PATH = 2048
_ENDLESS_PATH = "/live"
# For a server that does not count connections.
_UNCOUNTED = {"call": lambda: None}


def is_own_name(headers: Mapping[bytes, bytes], names: Collection[str] | None) -> bool:
    """Tell whether a request's host name is one of `names`; if `names` is None, any host is."""
    host = headers.get(b"host", b"").decode("latin-1").lower()
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return names is None or name in names


class SignOfLife:
    """Answers plain `GET /health`, so that health checks work however busy the server is.

    Requests with an `Origin` (from pages of other sites) are left to the application, which knows
    what CORS allows.
    """

    def __init__(self, allowed_hosts: Collection[str] | None) -> None:
        """Remember the host names that the server answers to; None: any."""
        self._hosts = allowed_hosts

    def __call__(self, scope: Mapping[str, Any]) -> bytes | None:
        """Return the body of the answer; None: the application answers."""
        if scope["path"] != "/health" or scope["method"] != "GET":
            return None
        headers = dict(scope["headers"])
        if b"origin" in headers or not is_own_name(headers, self._hosts):
            return None
        return HEALTHY


class Gate:
    """Passes valid requests on, and answers invalid requests with an error in their API's form."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str],
        allowed_hosts: list[str] | None,
        max_body_bytes: int,
    ) -> None:
        """Store the checks' settings.

        Without `api_keys`, requests need no key; `allowed_hosts` None accepts any host.
        """
        self._app = app
        self._keys = ApiKeys(api_keys)
        self._hosts = None if allowed_hosts is None else set(allowed_hosts)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if it is valid; otherwise answer it with an error."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD" and scope["path"] != _ENDLESS_PATH:
            scope = {**scope, "method": "GET"}  # the HTTP server sends only the headers
        headers: dict[bytes, bytes] = dict(scope["headers"])
        owner = self._keys.owner(headers)
        problem = self._problem(scope, headers, owner)
        if problem is not None:
            await refusal(scope, problem)(scope, receive, send)
            return
        if scope["path"] not in _OPEN_PATHS:
            scope.get("extensions", {}).get(ADMIT, _UNCOUNTED)["call"]()
        scope.setdefault("state", {})[OWNER] = owner or b""
        await self._app(scope, self._bounded(receive), send)

    def _problem(
        self, scope: Scope, headers: dict[bytes, bytes], owner: bytes | None
    ) -> ApiError | None:
        if not is_own_name(headers, self._hosts):
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
        is_json = kind == b"application/json"
        if not is_json and (kind not in _UNSAID or not _OF_PAGES.isdisjoint(headers)):
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
                raise self._too_large()
            return message

        return bounded

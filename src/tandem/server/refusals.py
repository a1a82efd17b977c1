"""Errors for clients; each is logged in one line, without the client's address or text."""

import logging

from fastapi.responses import JSONResponse
from starlette.types import Scope

from tandem.apis.errors import ApiError

_log = logging.getLogger("tandem.server")
_LONGEST_PATH = 200
_LONGEST_REASON = 400


def refusal(scope: Scope, error: ApiError) -> JSONResponse:
    """Log an error and return it in the form of the API that was called."""
    log_refusal(scope, error)
    return JSONResponse(error.body_for(scope["path"]), error.status, error.headers)


def log_refusal(scope: Scope, error: ApiError) -> None:
    """Log method, path, status and reason, unless the error is that the client has left."""
    if error.status != 499:
        _log.warning(
            "refused %s %s: %d, %s", scope["method"], plain(scope["path"], _LONGEST_PATH),
            error.status, plain(error.reason, _LONGEST_REASON),
        )  # fmt: skip


def plain(text: str, longest: int) -> str:
    """Return a client's text as one printable line, cut after `longest` characters."""
    shown = "".join(char if char.isprintable() else " " for char in text[:longest])
    return shown if len(text) <= longest else f"{shown}..."

"""Errors of the API in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

from typing import Any

from pydantic import ValidationError

from tandem.core.errors import TandemError
from tandem.core.registry import nearest_names


class ApiError(TandemError):
    """What a client is told: an HTTP status and a sentence."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        """Say what was found, what was expected and what to do in `message`."""
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """The headers that belong to it."""
        if self.retry_after_seconds is None:
            return {}
        return {"Retry-After": str(self.retry_after_seconds)}


def server_error(message: str, *, status: int = 500, code: str | None = None) -> ApiError:
    """Return an error that is the server's."""
    return ApiError(status, message, kind="server_error", code=code)


def busy(message: str, retry_after_seconds: int) -> ApiError:
    """Return the error for a queue that is full."""
    return ApiError(
        429,
        message,
        kind="rate_limit_error",
        code="queue_full",
        retry_after_seconds=retry_after_seconds,
    )


def from_validation(error: ValidationError, known: list[str]) -> ApiError:
    """Return the error for a body that is not as described; names the first field that is not."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if first["type"] == "extra_forbidden" and param is not None:
        name = str(first["loc"][-1])
        hint = f"; {nearest_names(name[:64], known)}" if len(first["loc"]) == 1 else ""
        message = f"unknown field {name[:64]!r}{hint}"
        return ApiError(400, message, param=param[:200], code="unknown_parameter")
    message = f"{param or 'the body'}: {first['msg']}"
    return ApiError(400, message, param=None if param is None else param[:200])

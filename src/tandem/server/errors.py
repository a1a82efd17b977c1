"""Errors of the API in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

from tandem.core.errors import TandemError


class ApiError(TandemError):
    """An error as the client gets it: an HTTP status and a sentence."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
        reason: str | None = None,
    ) -> None:
        """Say what was found, what was expected and what to do in `message`.

        `reason` is what the log says instead, where the message may repeat a part of a prompt.
        """
        super().__init__(message)
        self.reason = reason or message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds

    @property
    def body(self) -> dict[str, object]:
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

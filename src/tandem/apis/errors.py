"""Errors for clients, in the form that OpenAI's, Anthropic's or Ollama's API gives to errors."""

from tandem.core.errors import TandemError

ANTHROPIC_PATH = "/v1/messages"
OLLAMA_PATH = "/api/"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(TandemError):
    """An error for the client: an HTTP status and a sentence."""

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
        """Create an error; `message` must say what was found, what was expected and what to do.

        The log gets `reason` instead of `message`; give it if `message` may repeat a prompt.
        """
        super().__init__(message)
        self.reason = reason or message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle all arguments: an exception's own pickling drops keyword arguments."""
        return type(self), (self.status, str(self)), self.__dict__

    @property
    def body(self) -> dict[str, object]:
        """The response body in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def anthropic_body(self) -> dict[str, object]:
        """The response body in the form of Anthropic's API; the message names the wrong field."""
        kind = "api_error" if self.status >= 500 else "invalid_request_error"
        error = {"type": _ANTHROPIC_TYPES.get(self.status, kind), "message": self._named_message}
        return {"type": "error", "error": error, "request_id": None}

    @property
    def ollama_body(self) -> dict[str, object]:
        """The response body in the form of Ollama's API: a sentence that names the wrong field."""
        return {"error": self._named_message}

    @property
    def _named_message(self) -> str:
        message = str(self)
        is_named = not self.param or self.param in message
        return message if is_named else f"{self.param}: {message}"

    def body_for(self, path: str) -> dict[str, object]:
        """Return the response body in the form of the API that `path` belongs to."""
        if path.startswith(OLLAMA_PATH):
            return self.ollama_body
        return self.anthropic_body if path.startswith(ANTHROPIC_PATH) else self.body

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers of the response."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        seconds = self.retry_after_seconds
        return {} if seconds is None else {"Retry-After": str(seconds)}


def server_error(message: str, *, status: int = 500, code: str | None = None) -> ApiError:
    """Return an error that is the server's fault, not the client's."""
    return ApiError(status, message, kind="server_error", code=code)


def busy(message: str, retry_after_seconds: int) -> ApiError:
    """Return the error for a full queue or a used-up limit, with the seconds until a retry."""
    return ApiError(
        429,
        message,
        kind="rate_limit_error",
        code="queue_full",
        retry_after_seconds=retry_after_seconds,
    )

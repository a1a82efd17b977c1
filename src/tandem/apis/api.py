"""What one API is to the server: its bodies become requests, and their answers its own objects."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tandem.apis.answering import GenerationRequest
from tandem.apis.errors import ApiError
from tandem.apis.schemas import Asked
from tandem.engine.messages import ModelInfo
from tandem.generate.token_output import TokenOutput

B = TypeVar("B", bound=Asked)
# One object of a stream, before it is written.
Event = Mapping[str, object]


class Reply(Protocol):
    """The answer to one body, in an API's own form, as it comes."""

    def first_events(self) -> list[Event]:
        """Return what begins the stream, before anything is computed."""
        return []

    def take(self, index: int, token_output: TokenOutput) -> list[Event]:
        """Take one token of one request's answer; return the events that follow from it."""

    def last_events(self) -> list[Event]:
        """Return what ends the stream, once every answer has ended."""
        return []

    def failed(self, error: ApiError) -> Event:
        """Return the event that ends a stream which failed."""
        return error.body

    def whole(self) -> dict[str, object]:
        """Return the answer as one object, once every answer has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Api(Generic[B]):
    """One endpoint that generates."""

    endpoint: str
    """Its name in the counts."""
    body: type[B]
    requests: Callable[[B, ModelInfo], list[GenerationRequest]]
    """Runs beside the event loop; raises `ApiError` or `ConfigError`."""
    reply: Callable[[B, list[GenerationRequest]], Reply]
    encode: Callable[[Event], bytes]
    """Writes one event of a stream."""
    done: bytes = b""
    """What follows the last event."""

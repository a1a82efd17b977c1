"""What one API is to the server: its bodies become requests, and their answers its own objects."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tandem.apis.answering import GenerationRequest
from tandem.apis.errors import ApiError
from tandem.apis.schemas import Asked, Message
from tandem.engine.messages import ModelInfo
from tandem.generate.token_output import TokenOutput

B = TypeVar("B", bound=Asked)
# One object of a stream, before it is written.
Event = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a reply finds where its answer comes: it was begun in another process."""

    text_of: Callable[[int], str]
    """Returns a token's text."""
    keep: Callable[[Event, bytes, Message], None]
    """Keeps a response for later requests: itself, the conversation before it, its message."""


class Reply(Protocol):
    """The answer to one body, in an API's own form, as it comes. Pickled before its answer."""

    def arrive(self, surroundings: Surroundings) -> None:
        """Take what is not pickled; comes before everything else."""
        return

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


@dataclass(frozen=True, slots=True)
class Api(Generic[B]):
    """What bodies of one kind are turned into; the earlier conversation is JSON.

    Both raise `ApiError` or `ConfigError`.
    """

    body: type[B]
    requests: Callable[[B, ModelInfo, bytes], list[GenerationRequest]]
    reply: Callable[[B, list[GenerationRequest], bytes], Reply]
    at_once: Callable[[B], dict[str, object] | None] = lambda body: None
    """Returns the answer to a body that asks nothing of the model; None: it does."""


@dataclass(frozen=True, slots=True)
class Question(Generic[B]):
    """What bodies of one kind ask that needs no model; the earlier conversation is JSON."""

    body: type[B]
    answer: Callable[[B, ModelInfo, bytes], dict[str, object]]

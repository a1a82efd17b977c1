"""The interface of an API: it turns bodies into requests, and token outputs into replies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tandem.apis.answering import GenerationRequest
from tandem.apis.errors import ApiError
from tandem.apis.schemas import Message, RequestBody
from tandem.engine.messages import ModelInfo
from tandem.generate.token_output import TokenOutput

B = TypeVar("B", bound=RequestBody)
# One object of a stream, before it is serialized.
Event = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Functions of the HTTP side that a reply uses.

    The prompt process creates the reply and cannot pickle these functions with it, so the HTTP side
    attaches them with `Reply.arrive`.
    """

    text_of: Callable[[int], str]
    """Returns the text of a token id."""
    keep: Callable[[Event, bytes, Message], None]
    """Stores a response of the Responses API, so that later requests can continue from it.

    Arguments: the response object, the conversation up to the answer as JSON, the answer's message.
    """


class Reply(Protocol):
    """The answer to one body in an API's own form, built token by token.

    A reply must be picklable until `arrive` is called.
    """

    def arrive(self, surroundings: Surroundings) -> None:
        """Attach functions that cannot be pickled; must be called once, before any other method."""
        return

    def first_events(self) -> list[Event]:
        """Return the events that open the stream, before any token is computed."""
        return []

    def take(self, index: int, token_output: TokenOutput) -> list[Event]:
        """Add a token output of request `index` to the answer; return the resulting events."""

    def last_events(self) -> list[Event]:
        """Return the events that close the stream, after every answer has ended."""
        return []

    def failed(self, error: ApiError) -> Event:
        """Return the event that ends a stream which failed."""
        return error.body

    def whole(self) -> dict[str, object]:
        """Return the answer as one object; every request must have ended."""


@dataclass(frozen=True, slots=True)
class Api(Generic[B]):
    """Turns bodies of one kind into generation requests and replies.

    The last argument of `requests` and `reply` is the earlier conversation as JSON. Both may raise
    `ApiError` or `ConfigError`.
    """

    body: type[B]
    requests: Callable[[B, ModelInfo, bytes], list[GenerationRequest]]
    reply: Callable[[B, list[GenerationRequest], bytes], Reply]
    at_once: Callable[[B], dict[str, object] | None] = lambda body: None
    """Answers a body that needs no model; returns None for all other bodies."""


@dataclass(frozen=True, slots=True)
class Question(Generic[B]):
    """Answers bodies of one kind without running the model.

    The last argument of `answer` is the earlier conversation as JSON.
    """

    body: type[B]
    answer: Callable[[B, ModelInfo, bytes], dict[str, object]]

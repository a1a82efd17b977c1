"""Answers that later requests go on from, by their ids: in memory, the latest within a limit."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.apis.errors import ApiError
from tandem.apis.schemas import Message

_MOST_ANSWERS = 4096
_MOST_CHARACTERS = 64 << 20


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """An answer, and the conversation up to its end without its instructions."""

    response: Mapping[str, object]
    messages: Sequence[Message]
    num_characters: int
    """Of what it added to the conversation before it."""


class KeptResponses:
    """The latest answers. The event loop puts them in, threads look them up."""

    def __init__(
        self, most_answers: int = _MOST_ANSWERS, most_characters: int = _MOST_CHARACTERS
    ) -> None:
        """Keep so many answers at most, whose messages have so many characters at most."""
        self._most_answers, self._most_characters = most_answers, most_characters
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()
        self._num_characters = 0

    def put(
        self,
        response: Mapping[str, object],
        earlier: Sequence[Message],
        new: Sequence[Message],
    ) -> None:
        """Keep an answer, with the messages before it and those that it added."""
        size = sum(len(message.model_dump_json(exclude_none=True)) for message in new)
        self._kept[str(response["id"])] = KeptResponse(response, [*earlier, *new], size)
        self._num_characters += size
        while self._kept and (
            len(self._kept) > self._most_answers or self._num_characters > self._most_characters
        ):
            self._num_characters -= self._kept.popitem(last=False)[1].num_characters

    def messages(self, response_id: str | None) -> Sequence[Message]:
        """Return the conversation up to an answer; raises `ApiError` if it is not kept."""
        if response_id is None:
            return ()
        kept = self._kept.get(response_id)
        if kept is None:
            raise ApiError(
                400,
                f"previous response {response_id[:64]!r} is not kept here; send the conversation "
                "in input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return kept.messages

    def response(self, response_id: str) -> Mapping[str, object]:
        """Return an answer; 404 if it is not kept."""
        return self._require(response_id).response

    def drop(self, response_id: str) -> None:
        """Forget an answer; 404 if it is not kept."""
        self._num_characters -= self._require(response_id).num_characters
        del self._kept[response_id]

    def _require(self, response_id: str) -> KeptResponse:
        kept = self._kept.get(response_id)
        if kept is None:
            raise ApiError(404, f"response {response_id[:64]!r} is not kept here", code="not_found")
        return kept

"""Keeps finished responses in memory, by id, so that later requests can continue from them.

Responses are kept as JSON, so that the counted size is the real size: as Python objects, lists in a
tool's schema take twenty times as much memory. Each response is kept with the whole conversation
before it, because earlier responses may be dropped first.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from tandem.apis.errors import ApiError
from tandem.apis.schemas import Message

_MOST_ANSWERS = 4096
_MOST_BYTES = 64 << 20
# The size of an entry without its JSON.
_ENTRY_BYTES = 512
NO_MESSAGES = b"[]"
_MESSAGES = TypeAdapter(list[Message])


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response, and the conversation that ends with it, without instructions; both as JSON."""

    response: bytes
    messages: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes that the response takes in memory."""
        return len(self.response) + len(self.messages) + _ENTRY_BYTES


def joined(earlier: bytes, new: Sequence[Message]) -> bytes:
    """Return a conversation extended by new messages, as JSON."""
    added = _MESSAGES.dump_json(list(new), exclude_none=True, by_alias=True)
    both = earlier[:-1] + b"," + added[1:] if min(len(earlier), len(added)) > 2 else None
    return both or max(earlier, added, key=len)


def messages_of(conversation: bytes) -> Sequence[Message]:
    """Parse the messages of a conversation from JSON."""
    return _MESSAGES.validate_json(conversation)


class KeptResponses:
    """The latest responses, within limits of number and size."""

    def __init__(self, most_answers: int = _MOST_ANSWERS, most_bytes: int = _MOST_BYTES) -> None:
        """Keep at most `most_answers` responses and `most_bytes` bytes; drop the oldest first."""
        self._most_answers, self._most_bytes = most_answers, most_bytes
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that all responses take."""
        return self._num_bytes

    def put(self, response: Mapping[str, object], before: bytes, answer: Message) -> None:
        """Keep a response; `answer` is its message, `before` the conversation up to it as JSON."""
        messages = joined(before, [answer])
        written = json.dumps(response, ensure_ascii=False, separators=(",", ":")).encode()
        kept = KeptResponse(written, messages)
        self._kept[str(response["id"])] = kept
        self._num_bytes += kept.num_bytes
        while self._kept and (
            len(self._kept) > self._most_answers or self._num_bytes > self._most_bytes
        ):
            self._num_bytes -= self._kept.popitem(last=False)[1].num_bytes

    def conversation(self, response_id: str) -> bytes:
        """Return a response's conversation, its answer included, as JSON.

        Raises `ApiError` with status 400 if the response is not kept.
        """
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

    def response(self, response_id: str) -> bytes:
        """Return a response as JSON; raises `ApiError` with status 404 if it is not kept."""
        return self._require(response_id).response

    def drop(self, response_id: str) -> None:
        """Delete a response; raises `ApiError` with status 404 if it is not kept."""
        self._num_bytes -= self._require(response_id).num_bytes
        del self._kept[response_id]

    def _require(self, response_id: str) -> KeptResponse:
        kept = self._kept.get(response_id)
        if kept is None:
            raise ApiError(404, f"response {response_id[:64]!r} is not kept here", code="not_found")
        return kept

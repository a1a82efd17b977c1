"""An answer in the form of Anthropic's Messages API: one message, or the events of a stream.

The stream begins at the first token, because its first event states how many of the prompt's tokens
came from the KV cache.
"""

from collections.abc import Mapping

from tandem.apis.answering import GenerationRequest, new_id
from tandem.apis.api import Event, Reply
from tandem.apis.coming_answer import ComingAnswer, arguments_object
from tandem.apis.errors import ApiError
from tandem.dialects.coming_call import AnswerPart, Call
from tandem.generate.token_output import TokenOutput

_STOP_REASONS = {
    "stop": "end_turn",
    "stop_string": "stop_sequence",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
# Clients send a thinking block back with its signature; this server has no way to check it.
_SIGNATURE = "unsigned"


class MessageReply(Reply):
    """One message of Anthropic's API while it is generated."""

    def __init__(self, request: GenerationRequest, model: str, *, has_cache_marks: bool) -> None:
        """Begin the answer to a request.

        With `has_cache_marks`, computed prompt tokens count as `cache_creation_input_tokens`.
        """
        self._answer = ComingAnswer(request)
        self._has_cache_marks = has_cache_marks
        self._id, self._model = new_id("msg", "_"), model
        self._blocks: list[dict[str, object]] = []
        self._open: str | None = None  # the type of the block that is still growing
        self._input = ""  # a call's input, as JSON text
        self._has_begun = False

    def take(self, index: int, token_output: TokenOutput) -> list[Event]:
        """Add a token output to the message; return the resulting events."""
        parts = self._answer.take(token_output)
        start: Event = {"type": "message_start", "message": self._message()}
        events = [] if self._has_begun else [start]
        self._has_begun = True
        for part in parts:
            events += self._part(part)
        if self._answer.end is not None:
            events += self._close()
            events.append(self._delta())
            events.append({"type": "message_stop"})
        return events

    def failed(self, error: ApiError) -> Event:
        """Return the event that ends a stream which failed."""
        return error.anthropic_body

    def whole(self) -> dict[str, object]:
        """Return the message."""
        return {**self._message(), "content": self._blocks, **self._ending()}

    def _message(self) -> dict[str, object]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _delta(self) -> Event:
        return {"type": "message_delta", "delta": self._ending(), "usage": self._usage()}

    def _ending(self) -> dict[str, object]:
        end = self._answer.end
        is_stopped = end == "stop_string"
        return {
            "stop_reason": None if end is None else _STOP_REASONS[end],
            "stop_sequence": self._answer.tally.stop_string if is_stopped else None,
        }

    def _usage(self) -> dict[str, object]:
        """Return the usage; as in this API, tokens from the KV cache are not input tokens."""
        tally = self._answer.tally
        computed = tally.prompt_tokens - tally.reused_tokens
        marked = computed if self._has_cache_marks else 0
        return {
            "input_tokens": computed - marked,
            "cache_creation_input_tokens": marked,
            "cache_read_input_tokens": tally.reused_tokens,
            "output_tokens": tally.generated_tokens,
        }

    def _part(self, part: AnswerPart) -> list[Event]:
        if part.call is not None:
            return self._call(part.call)
        if part.arguments:
            return [self._more_input(part.arguments)]
        if part.reasoning:
            return self._grow("thinking", part.reasoning)
        return self._grow("text", part.content)

    def _grow(self, kind: str, text: str) -> list[Event]:
        """Append text to the open block of type `kind`, else to a new block; return the events."""
        events: list[Event] = []
        if self._open != kind:
            block: dict[str, object] = {"type": kind, kind: ""}
            if kind == "thinking":
                block["signature"] = ""
            events = [*self._close(), self._begin(block)]
            self._open = kind
        self._blocks[-1][kind] = f"{self._blocks[-1][kind]}{text}"
        return [*events, self._block_delta({"type": f"{kind}_delta", kind: text})]

    def _call(self, call: Call) -> list[Event]:
        block = {"type": "tool_use", "id": new_id("toolu", "_"), "name": call.name, "input": {}}
        events = [*self._close(), self._begin(block)]
        self._open, self._input = "tool_use", ""
        return [*events, self._more_input(call.arguments)]

    def _more_input(self, text: str) -> Event:
        self._input += text
        return self._block_delta({"type": "input_json_delta", "partial_json": text})

    def _begin(self, block: Mapping[str, object]) -> Event:
        self._blocks.append(dict(block))
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _block_delta(self, delta: Mapping[str, object]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> list[Event]:
        """End the open block, if there is one; return the events."""
        events: list[Event] = []
        if self._open == "thinking":
            self._blocks[-1]["signature"] = _SIGNATURE
            events.append(self._block_delta({"type": "signature_delta", "signature": _SIGNATURE}))
        if self._open == "tool_use":
            self._blocks[-1]["input"] = arguments_object(self._input)
        if self._open is not None:
            events.append({"type": "content_block_stop", "index": self._index})
        self._open = None
        return events

    @property
    def _index(self) -> int:
        return len(self._blocks) - 1

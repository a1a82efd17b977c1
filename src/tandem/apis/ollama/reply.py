"""An answer in the form of Ollama's API: one object, or a stream with one object per line."""

import time
from collections.abc import Callable
from datetime import UTC, datetime

from tandem.apis.answering import GenerationRequest, new_id
from tandem.apis.api import Event, Reply, Surroundings
from tandem.apis.coming_answer import ComingAnswer, arguments_object, logprob_entry
from tandem.apis.errors import ApiError
from tandem.dialects.coming_call import AnswerPart
from tandem.generate.token_output import TokenOutput

_Json = dict[str, object]
# One part of an answer before it is serialized: text, thinking or a whole call.
_Piece = _Json


def timestamp(seconds: float) -> str:
    """Return a Unix time in the format of Ollama's objects: ISO 8601 in UTC, with a Z."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class OllamaReply(Reply):
    """One answer while it is generated: a chat's message, or a text."""

    def __init__(
        self,
        request: GenerationRequest,
        model: str,
        *,
        is_chat: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begin the answer to a request. `clock` returns seconds since 1970."""
        self._answer = ComingAnswer(request)
        self._model, self._is_chat, self._clock = model, is_chat, clock
        self._began = self._first = self._latest = 0.0
        self._text = {"content": "", "thinking": ""}
        self._calls: list[_Json] = []
        self._open: tuple[str, str] | None = None  # name and arguments of the call that is arriving
        self._logprobs: list[_Json] = []
        self._num_sent_logprobs = 0

    def arrive(self, surroundings: Surroundings) -> None:
        """Attach the function that returns a token's text, and note when the answer began."""
        self._text_of = surroundings.text_of
        self._began = self._clock()

    def take(self, index: int, token_output: TokenOutput) -> list[Event]:
        """Add a token output to the answer; return the resulting lines."""
        self._latest = self._clock()
        self._first = self._first or self._latest
        if token_output.logprob is not None:
            self._logprobs.append(logprob_entry(token_output.logprob, self._text_of))
        pieces = [piece for part in self._answer.take(token_output) for piece in self._part(part)]
        is_last = self._answer.end is not None
        if is_last:
            pieces += self._closed()
        events: list[Event] = [self._line(piece) for piece in pieces]
        if is_last:
            events.append(self._line({"content": ""}) | self._ending())
        return events

    def failed(self, error: ApiError) -> Event:
        """Return the line that ends a stream which failed."""
        return error.ollama_body

    def whole(self) -> dict[str, object]:
        """Return the answer as one object."""
        piece: _Json = {"content": self._text["content"]}
        if self._text["thinking"]:
            piece["thinking"] = self._text["thinking"]
        if self._calls:
            piece["tool_calls"] = self._calls
        self._num_sent_logprobs = 0
        return self._line(piece) | self._ending()

    def _part(self, part: AnswerPart) -> list[_Piece]:
        if part.arguments and self._open is not None:
            name, arguments = self._open
            self._open = name, arguments + part.arguments
            return []
        pieces = self._closed()
        if part.call is not None:
            self._open = part.call.name, part.call.arguments
            return pieces
        kind, text = ("thinking", part.reasoning) if part.reasoning else ("content", part.content)
        self._text[kind] += text
        return [*pieces, {"content": "", kind: text}]

    def _closed(self) -> list[_Piece]:
        """End the tool call that is arriving; return it as one piece, or [] without a call."""
        if self._open is None:
            return []
        name, arguments = self._open
        self._open = None
        function = {
            "index": len(self._calls), "name": name, "arguments": arguments_object(arguments),
        }  # fmt: skip
        call: _Json = {"id": new_id("call", "_"), "function": function}
        self._calls.append(call)
        return [{"content": "", "tool_calls": [call]}]

    def _line(self, piece: _Piece) -> _Json:
        line: _Json = {"model": self._model, "created_at": timestamp(self._clock())}
        if self._is_chat:
            line["message"] = {"role": "assistant", **piece}
        else:
            line["response"] = piece["content"]
            line |= {"thinking": piece["thinking"]} if "thinking" in piece else {}
        new = self._logprobs[self._num_sent_logprobs :]
        self._num_sent_logprobs = len(self._logprobs)
        return line | ({"logprobs": new} if new else {}) | {"done": False}

    def _ending(self) -> _Json:
        """Return the fields of the last line: why the answer ended, token counts and durations."""
        tally = self._answer.tally
        return {
            "done": True,
            "done_reason": "length" if self._answer.end == "length" else "stop",
            "total_duration": _nanoseconds(self._latest - self._began),
            "load_duration": 0,
            "prompt_eval_count": tally.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(self._first - self._began),
            "eval_count": tally.generated_tokens,
            "eval_duration": _nanoseconds(self._latest - self._first),
        }


def loaded(model: str, *, is_chat: bool, is_unloaded: bool) -> _Json:
    """Return the response to a body without a prompt; clients send it to load or unload a model."""
    empty: _Json = {"message": {"role": "assistant", "content": ""}}
    return {
        "model": model,
        "created_at": timestamp(time.time()),
        **(empty if is_chat else {"response": ""}),
        "done": True,
        "done_reason": "unload" if is_unloaded else "load",
    }


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))

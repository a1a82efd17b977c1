"""An answer in the form of OpenAI's Responses API: one response, or the events of a stream."""

from tandem.apis.answering import GenerationRequest, new_id, now_seconds
from tandem.apis.api import Event, Reply, Surroundings
from tandem.apis.coming_answer import ComingAnswer
from tandem.apis.errors import ApiError
from tandem.apis.responses.schemas import ResponsesRequest
from tandem.apis.responses.tools import OpenCall, known_tools
from tandem.apis.schemas import FunctionCall, Message, ToolCall
from tandem.dialects.coming_call import AnswerPart, Call
from tandem.generate.token_output import TokenOutput

_Json = dict[str, object]
# Types of items that grow: (type of the item, type of its part).
_TEXT = ("message", "output_text")
_REASONING = ("reasoning", "reasoning_text")


class ResponseReply(Reply):
    """One response while it is generated."""

    def __init__(
        self,
        body: ResponsesRequest,
        request: GenerationRequest,
        model: str,
        before: bytes | None,
    ) -> None:
        """Begin the answer.

        `before` is the conversation up to the answer, as JSON; None: the response will not be kept.
        """
        self._answer, self._before = ComingAnswer(request), before
        self._head = _head(body, model)
        self._items: list[_Json] = []
        self._open: tuple[str, str] | None = None  # the type of the item that is still growing
        self._tools = {name: tool.called for name, tool in known_tools(body.tools).items()}
        self._call: OpenCall | None = None  # the call that is still growing
        self._message = Message.model_construct(role="assistant", content="")
        self._number = 0

    def arrive(self, surroundings: Surroundings) -> None:
        """Attach the function that stores the finished response."""
        self._keep = surroundings.keep

    def first_events(self) -> list[Event]:
        """Return the events that open the stream."""
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._response("in_progress")) for kind in kinds]

    def take(self, index: int, token_output: TokenOutput) -> list[Event]:
        """Add a token output to the response; return the resulting events."""
        events: list[Event] = []
        for part in self._answer.take(token_output):
            events += self._part(part)
        if self._answer.end is not None:
            events += self._close()
            response = self.whole()
            if self._before is not None:
                self._keep(response, self._before, self._message)
            events.append(self._event(f"response.{response['status']}", response=response))
        return events

    def failed(self, error: ApiError) -> Event:
        """Return the event that ends a stream which failed."""
        failure = {"code": error.code or "server_error", "message": str(error)}
        response = {**self._response("failed"), "error": failure}
        return self._event("response.failed", response=response)

    def whole(self) -> _Json:
        """Return the response object; the answer must have ended."""
        is_cut = self._answer.end == "length"
        response = self._response("incomplete" if is_cut else "completed")
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return {**response, "usage": self._usage()}

    def _response(self, status: str) -> _Json:
        return {**self._head, "status": status, "output": list(self._items)}

    def _usage(self) -> _Json:
        tally = self._answer.tally
        computed = tally.prompt_tokens - tally.reused_tokens
        return {
            "input_tokens": tally.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": tally.reused_tokens, "cache_write_tokens": computed,
            },
            "output_tokens": tally.generated_tokens,
            "output_tokens_details": {"reasoning_tokens": tally.reasoning_tokens},
            "total_tokens": tally.prompt_tokens + tally.generated_tokens,
        }  # fmt: skip

    def _event(self, kind: str, **fields: object) -> Event:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}

    # ---- items -----------------------------------------------------------------------------------

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _part(self, part: AnswerPart) -> list[Event]:
        if part.call is not None:
            return self._begin_call(part.call)
        if part.arguments:
            return self._more_of_call(part.arguments)
        if part.reasoning:
            before = self._message.reasoning_content or ""
            self._message.reasoning_content = before + part.reasoning
            return self._grow(_REASONING, part.reasoning)
        self._message.content = f"{self._message.content}{part.content}"
        return self._grow(_TEXT, part.content)

    def _grow(self, kind: tuple[str, str], text: str) -> list[Event]:
        """Append text to the open item of type `kind`, else to a new item; return the events."""
        events = [] if self._open == kind else [*self._close(), *self._begin(kind)]
        part = self._open_part()
        part["text"] = f"{part['text']}{text}"
        return [*events, self._text_event(kind, "delta", delta=text)]

    def _begin(self, kind: tuple[str, str]) -> list[Event]:
        item: _Json = {"type": kind[0], "status": "in_progress", "content": []}
        if kind == _TEXT:
            item |= {"id": new_id("msg", "_"), "role": "assistant"}
        else:
            item |= {"id": new_id("rs", "_"), "summary": []}
        events = [self._added(item)]
        part: _Json = {"type": kind[1], "text": ""}
        if kind == _TEXT:
            part |= {"annotations": [], "logprobs": []}
        self._open = kind
        events.append(self._part_event("response.content_part.added", part=dict(part)))
        item["content"] = [part]
        return events

    def _close(self) -> list[Event]:
        """End the open item or call, if there is one; return the events."""
        kind, self._open = self._open, None
        if kind is None:
            return self._end_call()
        part, item = self._open_part(), self._items[-1]
        item["status"] = "incomplete" if self._answer.end == "length" else "completed"
        return [
            self._text_event(kind, "done", text=part["text"]),
            self._part_event("response.content_part.done", part=part),
            self._done(item),
        ]

    def _begin_call(self, call: Call) -> list[Event]:
        events = self._close()
        opened = self._call = OpenCall(call.name, self._tools)
        function = FunctionCall.model_construct(name=call.name, arguments="")
        written = ToolCall.model_construct(id=str(opened.item["call_id"]), function=function)
        self._message.tool_calls = [*(self._message.tool_calls or ()), written]
        return [*events, self._added(opened.item), *self._more_of_call(call.arguments)]

    def _more_of_call(self, text: str) -> list[Event]:
        assert self._call is not None
        self._call.arguments += text
        if self._call.is_custom:  # the input is part of the arguments
            return []
        return [self._call_event("delta", delta=text)]

    def _end_call(self) -> list[Event]:
        """End the open call, if there is one; return the events."""
        call = self._call
        if call is None:
            return []
        done = call.end("incomplete" if self._answer.end == "length" else "completed")
        assert self._message.tool_calls is not None
        self._message.tool_calls[-1].function.arguments = call.arguments
        events = [self._call_event("delta", delta=done["input"])] if call.is_custom else []
        events += [self._call_event("done", **done), self._done(call.item)]
        self._call = None
        return events

    def _call_event(self, kind: str, **fields: object) -> Event:
        assert self._call is not None
        place: _Json = {"item_id": self._call.item["id"], "output_index": self._index}
        return self._event(f"{self._call.kind}.{kind}", **place, **fields)

    def _added(self, item: _Json) -> Event:
        self._items.append(item)
        kind = "response.output_item.added"
        return self._event(kind, output_index=self._index, item=dict(item))

    def _done(self, item: _Json) -> Event:
        kind = "response.output_item.done"
        return self._event(kind, output_index=self._index, item=dict(item))

    def _text_event(self, kind: tuple[str, str], what: str, **fields: object) -> Event:
        logprobs: _Json = {"logprobs": []} if kind == _TEXT else {}
        return self._part_event(f"response.{kind[1]}.{what}", **fields, **logprobs)

    def _part_event(self, kind: str, **fields: object) -> Event:
        place: _Json = {"output_index": self._index, "content_index": 0}
        return self._event(kind, item_id=self._items[-1]["id"], **place, **fields)

    def _open_part(self) -> _Json:
        content = self._items[-1]["content"]
        assert isinstance(content, list)
        part: _Json = content[0]
        return part


def _head(body: ResponsesRequest, model: str) -> _Json:
    """Return the fields of a new response; many repeat fields of the request."""
    defaults: _Json = {
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "store": True,
        "text": {"format": {"type": "text"}}, "truncation": "disabled", "metadata": {},
        "reasoning": {"effort": None, "summary": None},
    }  # fmt: skip
    names = (
        "instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p", "user",
        *defaults,
    )  # fmt: skip
    fields = body.model_dump(mode="json", by_alias=True, exclude_none=True, include=set(names))
    return {
        "id": new_id("resp", "_"),
        "object": "response",
        "created_at": now_seconds(),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        **{name: fields.get(name, defaults.get(name)) for name in names},
    }

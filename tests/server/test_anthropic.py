"""Tests of Anthropic's Messages API: meaning of bodies, form of answers, refusals."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.apis.answering import GenerationRequest
from tandem.apis.anthropic.conversation import as_chat
from tandem.apis.anthropic.reply import MessageReply
from tandem.apis.anthropic.schemas import MessagesRequest
from tandem.apis.errors import ApiError
from tandem.apis.reading import read_body
from tandem.apis.schemas import ChatRequest
from tandem.dialects.coming_call import AnswerPart, Call
from tandem.generate.request import Request
from tandem.generate.token_output import TokenOutput
from tests.server.anthropic_events import message_of
from tests.server.running import Reply, RunningServer
from tests.server.test_api import SCHEMA, TOOL

HELLO: Any = [{"role": "user", "content": "hello"}]
ANTHROPIC_TOOL = {"name": "f", "input_schema": TOOL["function"]["parameters"]}  # type: ignore[index]
MARK = {"cache_control": {"type": "ephemeral"}}


def chat_of(**fields: Any) -> ChatRequest:
    raw = json.dumps({"max_tokens": 9, "messages": HELLO, **fields}).encode()
    return as_chat(read_body(MessagesRequest, raw, is_strict=True).body)


def ask(server: RunningServer, **fields: Any) -> Reply:
    return server.post("/v1/messages", **{"max_tokens": 9, "messages": HELLO, **fields})


def test_a_conversation_with_tools_means_the_same_chat() -> None:
    chat = chat_of(
        system=[{"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
                {"type": "text", "text": "Be short.", **MARK}],
        tools=[{**ANTHROPIC_TOOL, **MARK}],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        stop_sequences=["END"],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "look", **MARK}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"n": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "is_error": False,
                 "content": [{"type": "text", "text": "blue"}]},
                {"type": "text", "text": "and now?"}]},
        ],
    )  # fmt: skip
    assert [message.role for message in chat.messages] == [
        "system", "user", "assistant", "tool", "user",
    ]  # fmt: skip
    assert [message.content for message in chat.messages] == [
        "Be short.", "look", "I look.", "blue", "and now?",
    ]  # fmt: skip
    answer = chat.messages[2]
    assert answer.reasoning_content == "hm"
    assert answer.tool_calls is not None
    assert json.loads(answer.tool_calls[0].function.arguments) == {"n": 1}
    assert chat.messages[3].tool_call_id == "t1"
    assert (chat.enable_thinking, chat.stop, chat.parallel_tool_calls) == (True, ["END"], False)


def test_a_message_of_the_assistant_at_the_end_is_gone_on_with() -> None:
    assert chat_of(messages=[*HELLO, {"role": "assistant", "content": "I"}]).continue_final_message
    assert chat_of(thinking={"type": "disabled"}).enable_thinking is False
    limited = chat_of(thinking={"type": "enabled", "budget_tokens": 5})
    assert (limited.enable_thinking, limited.thinking_token_budget) == (True, 5)
    assert chat_of().continue_final_message is None


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "image", "source": {"type": "file", "file_id": "x"}}, "send its data as base64"),
        ({"type": "document", "source": {"type": "base64", "data": ""}}, "plain text only"),
    ],
)
def test_what_no_text_model_reads_is_named(block: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words):
        chat_of(messages=[{"role": "user", "content": [block]}])
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    with pytest.raises(ApiError, match=words):
        chat_of(messages=[{"role": "user", "content": [result]}])


class Scripted:
    """A dialect that returns scripted parts for any text."""

    def __init__(self, parts: Sequence[AnswerPart]) -> None:
        self._parts = list(parts)

    def feed(self, text: str) -> list[AnswerPart]:
        return [self._parts.pop(0)]

    def finish(self) -> list[AnswerPart]:
        return []


def token(number: int, finish_reason: Any = None, stop_string: str | None = None) -> TokenOutput:
    return TokenOutput(
        request_id=1, text="x", token_id=5, finish_reason=finish_reason,
        generated_tokens=number, reused_tokens=3, stop_string=stop_string,
    )  # fmt: skip


@pytest.mark.parametrize("has_marks", [False, True])
def test_thoughts_text_and_calls_are_blocks_of_their_own(has_marks: bool) -> None:
    parts = [
        AnswerPart(reasoning="let "), AnswerPart(reasoning="me"), AnswerPart(content="I "),
        AnswerPart(content="look"), AnswerPart(call=Call("f", '{"n": 1}')),
        AnswerPart(call=Call("g", "no json")),
    ]  # fmt: skip
    reader: Any = Scripted(parts)
    request = GenerationRequest(request=Request(prompt=(1,) * 10), prompt_text="", reader=reader)
    reply = MessageReply(request, "tiny", has_cache_marks=has_marks)
    events: list[dict[str, Any]] = [
        dict(event)
        for number in range(1, 7)
        for event in reply.take(0, token(number, "stop" if number == 6 else None))
    ]
    whole: dict[str, Any] = reply.whole()
    assert whole["stop_reason"] == "tool_use"
    thought, text, first, second = whole["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "let me")
    assert thought["signature"]
    assert text == {"type": "text", "text": "I look"}
    assert (first["name"], first["input"]) == ("f", {"n": 1})
    assert (second["name"], second["input"]) == ("g", {"arguments": "no json"})
    assert whole["usage"] == {
        "input_tokens": 0 if has_marks else 7,
        "cache_creation_input_tokens": 7 if has_marks else 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 6,
    }
    texts = [e["delta"]["partial_json"] for e in events if "partial_json" in e.get("delta", {})]
    assert texts == ['{"n": 1}', "no json"]
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] == 3


def test_a_stream_is_the_same_message(server: RunningServer) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    whole = ask(server, **fields).json
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "tiny")
    assert whole["stop_reason"] == "max_tokens"
    assert whole["usage"]["output_tokens"] == 12
    reply = ask(server, **fields, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    streamed = message_of(reply.named_events)
    assert streamed["content"] == whole["content"]
    assert streamed["stop_reason"] == whole["stop_reason"]


def test_a_tool_that_must_be_called_is_called(server: RunningServer) -> None:
    fields: dict[str, Any] = {"tools": [ANTHROPIC_TOOL], "max_tokens": 90}
    for choice in ({"type": "any"}, {"type": "tool", "name": "f"}):
        for stream in (False, True):
            reply = ask(server, **fields, tool_choice=choice, stream=stream)
            message = message_of(reply.named_events) if stream else reply.ok
            (block,) = message["content"]
            assert (block["type"], block["name"]) == ("tool_use", "f")
            assert block["input"]["n"] in (1, 22)
            assert message["stop_reason"] == "tool_use"


def test_a_stop_sequence_is_named(server: RunningServer) -> None:
    free = ask(server, temperature=0, max_tokens=30).json["content"][0]["text"]
    stop = free[6:8]
    message = ask(server, temperature=0, max_tokens=30, stop_sequences=["never", stop]).json
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"][0]["text"] == free.partition(stop)[0]


def test_a_schema_is_followed(server: RunningServer) -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = ask(server, output_config=form, max_tokens=90).json
    assert json.loads(message["content"][0]["text"])["count"] in (1, 22)


def test_tokens_are_counted_and_what_was_read_from_the_kv_cache_is_told(
    server: RunningServer,
) -> None:
    system = [{"type": "text", "text": "a beginning that is sent again and again", **MARK}]
    body: dict[str, Any] = {"system": system, "tools": [ANTHROPIC_TOOL], "messages": HELLO}
    number = server.post("/v1/messages/count_tokens", **body).ok["input_tokens"]
    first, again = (ask(server, **body).json["usage"] for _ in range(2))
    for usage in (first, again):
        created, read = usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]
        assert usage["input_tokens"] + created + read == number
    assert again["cache_read_input_tokens"] == number - 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "'tool_result'"),
        ({"messages": [{"role": "user", "content": "x" * 40_000}]}, "the prompt is too long"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tool_choice": {"type": "tool"}, "tools": [ANTHROPIC_TOOL]}, "tool_choice.name"),
        ({"container": "x"}, "container is not supported"),
    ],
)
def test_errors_have_the_form_of_the_api(
    server: RunningServer, fields: dict[str, Any], words: str
) -> None:
    reply = ask(server, **fields)
    assert reply.status == 400
    assert reply.json["type"] == "error"
    assert reply.json["error"]["type"] == "invalid_request_error"
    assert words in reply.json["error"]["message"]


def test_errors_before_the_routes_have_that_form_too(server: RunningServer) -> None:
    reply = server.ask("POST", "/v1/messages", b"{}", {"Content-Type": "text/plain"})
    assert (reply.status, reply.json["type"]) == (415, "error")
    assert server.ask("GET", "/v1/messages").json["type"] == "error"

"""Tests of OpenAI's Responses API: bodies, answers, and stored responses."""

import json
import pickle
from typing import Any

import pytest

from tandem.apis.errors import ApiError
from tandem.apis.reading import read_body
from tandem.apis.responses.conversation import as_chat, new_messages
from tandem.apis.responses.kept import NO_MESSAGES, KeptResponses, messages_of
from tandem.apis.responses.schemas import ResponsesRequest
from tandem.apis.schemas import ChatRequest, Message
from tests.server.running import Reply, RunningServer
from tests.server.test_api import SCHEMA, TOOL

FUNCTION = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]


def body_of(**fields: Any) -> ResponsesRequest:
    raw = json.dumps({"input": "hello", **fields}).encode()
    return read_body(ResponsesRequest, raw, is_strict=True).body


def chat_of(**fields: Any) -> ChatRequest:
    body = body_of(**fields)
    return as_chat(body, (), new_messages(body))


def ask(server: RunningServer, **fields: Any) -> Reply:
    return server.post("/v1/responses", **{"input": "hello", "max_output_tokens": 9, **fields})


def events_of(reply: Reply) -> list[dict[str, Any]]:
    """Return a stream's events, which must be numbered."""
    events = reply.named_events
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


def test_items_of_an_answer_are_one_message_of_a_chat() -> None:
    chat = chat_of(
        instructions="Be short.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
            {"type": "reasoning", "id": "r", "summary": [],
             "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "id": "m", "status": "completed",
             "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "blue"},
            {"type": "function_call_output", "call_id": "c2",
             "output": [{"type": "input_text", "text": "red"}]},
        ],
        tools=[FUNCTION],
        tool_choice={"type": "allowed_tools", "mode": "required",
                     "tools": [{"type": "function", "name": "f"}]},
        reasoning={"effort": "low"},
    )  # fmt: skip
    assert [message.role for message in chat.messages] == [
        "system", "user", "assistant", "tool", "tool",
    ]  # fmt: skip
    answer = chat.messages[2]
    assert (answer.reasoning_content, answer.content) == ("hm", "I look.")
    assert [call.id for call in answer.tool_calls or ()] == ["c1", "c2"]
    assert [message.content for message in chat.messages[3:]] == ["blue", "red"]
    assert (chat.tool_choice, chat.reasoning_effort) == ("required", "low")
    assert chat.tools is not None
    with pytest.raises(ApiError, match="input_image needs image_url"):
        chat_of(input=[{"role": "user", "content": [{"type": "input_image"}]}])


def test_a_stream_is_the_same_response(server: RunningServer) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_output_tokens": 12}
    whole = ask(server, **fields).json
    assert (whole["object"], whole["status"], whole["model"]) == ("response", "incomplete", "tiny")
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["usage"]["output_tokens"] == 12
    (item,) = whole["output"]
    text = item["content"][0]["text"]
    events = events_of(ask(server, **fields, stream=True))
    assert [event["type"] for event in events[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert [event["type"] for event in events[-4:]] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.incomplete",
    ]  # fmt: skip
    deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
    assert "".join(deltas) == text == events[-4]["text"]
    (last,) = events[-1]["response"]["output"]
    assert last["content"] == item["content"]


def test_a_tool_that_must_be_called_is_called(server: RunningServer) -> None:
    fields: dict[str, Any] = {"tools": [FUNCTION], "max_output_tokens": 90}
    for choice in ("required", {"type": "function", "name": "f"}):
        response = ask(server, **fields, tool_choice=choice).ok
        (item,) = response["output"]
        assert (item["type"], item["name"]) == ("function_call", "f")
        assert json.loads(item["arguments"])["n"] in (1, 22)
        assert response["status"] == "completed"
    events = events_of(ask(server, **fields, tool_choice="required", stream=True))
    (done,) = [e for e in events if e["type"] == "response.function_call_arguments.done"]
    assert json.loads(done["arguments"])["n"] in (1, 22)
    assert events[-1]["response"]["output"][0]["arguments"] == done["arguments"]


def test_a_schema_is_followed(server: RunningServer) -> None:
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    (item,) = ask(server, text=form, max_output_tokens=90).json["output"]
    assert json.loads(item["content"][0]["text"])["count"] in (1, 22)


def test_an_answer_is_gone_on_from_by_its_id(server: RunningServer) -> None:
    first = ask(server, input="tell me more", temperature=0).json
    text = first["output"][0]["content"][0]["text"]
    messages = [
        {"role": "user", "content": "tell me more"}, {"role": "assistant", "content": text},
        {"role": "user", "content": "go on"},
    ]  # fmt: skip
    whole = ask(server, input=messages, temperature=0).json
    again = ask(server, input="go on", temperature=0, previous_response_id=first["id"]).json
    assert again["output"][0]["content"] == whole["output"][0]["content"]
    assert again["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert again["previous_response_id"] == first["id"]
    assert server.ask("GET", f"/v1/responses/{first['id']}").json == first
    assert server.ask("DELETE", f"/v1/responses/{first['id']}").json["deleted"]
    for reply in (
        ask(server, previous_response_id=first["id"]),
        ask(server, previous_response_id=ask(server, store=False).json["id"]),
    ):
        assert (reply.status, reply.error["code"]) == (400, "previous_response_not_found")
    assert server.ask("GET", "/v1/responses/none").status == 404


def test_tokens_are_counted(server: RunningServer) -> None:
    body: dict[str, Any] = {"input": "hello", "instructions": "Be short.", "tools": [FUNCTION]}
    counted = server.post("/v1/responses/input_tokens", **body).ok["input_tokens"]
    assert ask(server, **body).json["usage"]["input_tokens"] == counted


CUSTOM = {"type": "custom", "name": "patch", "description": "Applies a patch.", "format": {
    "type": "grammar", "syntax": "lark", "definition": "start: /x+/"}}  # fmt: skip


def test_custom_tools_take_a_text_and_namespaces_hold_tools(server: RunningServer) -> None:
    spaced = {"type": "namespace", "name": "crm", "description": "x", "tools": [FUNCTION, CUSTOM]}
    chat = chat_of(
        tools=[CUSTOM, spaced],
        input=[
            {"role": "user", "content": "go"},
            {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a "b"'},
            {"type": "function_call", "call_id": "c2", "name": "f", "namespace": "crm",
             "arguments": "{}"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        ],
        tool_choice={"type": "custom", "name": "patch"},
    )  # fmt: skip
    tools = [tool.function for tool in chat.tools or ()]
    assert [tool.name for tool in tools] == ["patch", "crm__f", "crm__patch"]
    assert "start: /x+/" in str(tools[0].description)
    calls = [call.function for call in chat.messages[1].tool_calls or ()]
    assert [call.name for call in calls] == ["patch", "crm__f"]
    assert json.loads(calls[0].arguments) == {"input": 'a "b"'}
    assert chat.messages[2].content == "done"

    for name, namespace in (("patch", None), ("patch", "crm"), ("f", "crm")):
        choice = {"type": "custom", "name": name, "namespace": namespace}
        events = events_of(
            ask(server, tools=[CUSTOM, spaced], tool_choice=choice, max_output_tokens=400,
                temperature=1.0, stream=True)
        )  # fmt: skip
        response = events[-1]["response"]
        (item,) = response["output"]
        assert (item["name"], item.get("namespace")) == (name, namespace)
        if name == "f":
            assert item["type"] == "function_call"
            continue
        assert item["type"] == "custom_tool_call"
        done = [e for e in events if e["type"] == "response.custom_tool_call_input.done"]
        assert [e["input"] for e in done] == [item["input"]]
        body = {"previous_response_id": response["id"], "tools": [CUSTOM, spaced]}
        assert ask(server, input="and?", **body).status == 200


def test_the_latest_answers_are_kept_within_limits() -> None:
    kept = KeptResponses(most_answers=2, most_bytes=10_000)
    for name in "abc":
        kept.put({"id": name}, NO_MESSAGES, Message.model_construct(role="user", content=name))
    assert [message.content for message in messages_of(kept.conversation("c"))] == ["c"]
    assert kept.response("b") == b'{"id":"b"}'
    with pytest.raises(ApiError, match="not kept"):
        kept.conversation("a")
    kept.put({"id": "d"}, NO_MESSAGES, Message.model_construct(role="user", content="x" * 9_300))
    with pytest.raises(ApiError, match="not kept"):
        kept.conversation("c")
    kept.drop("d")
    assert kept.num_bytes == 0


def test_all_that_is_kept_is_counted() -> None:
    """120 answers with empty tool lists once took 460 MB, with a limit of 64 MiB."""
    kept = KeptResponses(most_bytes=2_000_000)
    for number in range(30):
        schema: dict[str, object] = {"enum": [[] for _ in range(50_000)]}
        head = {"id": f"r{number}", "metadata": {"a": "x" * 50_000}, "tools": [schema]}
        kept.put(head, NO_MESSAGES, Message.model_construct(role="user", content="x"))
    assert len(pickle.dumps(kept)) <= 2_000_000
    before = NO_MESSAGES
    for number in range(10):  # each continues the one before, which is dropped first
        kept.put(
            {"id": f"s{number}"},
            before,
            Message.model_construct(role="user", content="y" * 100_000),
        )
        before = kept.conversation(f"s{number}")
    assert len(messages_of(kept.conversation("s9"))) == 10
    assert len(pickle.dumps(kept)) <= 2_000_000


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": None}, "input is missing"),
        ({"input": []}, "input has no message"),
        ({"background": True}, "background is not supported; wait for the answer"),
        ({"conversation": "c"}, "conversation is not supported"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input.0"),
        ({"input": "x" * 40_000}, "the prompt is too long"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "needs a schema"),
        ({"tool_choice": "required"}, "there are no tools"),
    ],
)
def test_a_bad_field_is_named(server: RunningServer, fields: dict[str, Any], words: str) -> None:
    reply = ask(server, **fields)
    assert reply.status == 400
    assert words in reply.error["message"]


def test_tools_that_run_elsewhere_are_left_out_and_logged(server: RunningServer) -> None:
    assert ask(server, tools=[{"type": "web_search"}, FUNCTION]).status == 200
    server.wait_for_log("'tools of type web_search'")


def test_texts_become_tokens_and_back(server: RunningServer) -> None:
    tokens = server.post("/tokenize", prompt="hello").ok
    assert tokens["count"] == len(tokens["tokens"])
    back = server.post("/detokenize", tokens=tokens["tokens"]).ok
    assert "hello" in back["prompt"]
    assert back["content"] == back["prompt"]
    messages = [{"role": "user", "content": "hello"}]
    chat = server.post("/tokenize", messages=messages, return_token_strs=True).ok
    assert chat["count"] == server.chat("hello", max_tokens=1).ok["usage"]["prompt_tokens"]
    assert len(chat["token_strs"]) == chat["count"]
    pieces = server.post("/tokenize", content="hello", with_pieces=True).ok
    assert pieces["tokens"][0].keys() == {"id", "piece"}
    assert server.post("/tokenize").status == 400
    assert "unknown" in server.post("/detokenize", tokens=[999]).error["message"]

"""Tests of real, unchanged clients, and of the one in `examples/`, against the server."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import InferenceClient

from tests.server.running import RunningServer
from tests.server.test_api import SCHEMA, TOOL
from tests.test_examples import example

if TYPE_CHECKING:  # three processes collect these tests, one runs them
    import anthropic
    import openai

MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Any:
    import openai

    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_chats_and_streams(client: "openai.OpenAI") -> None:
    whole = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=9, temperature=0
    )
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=9, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == 9  # type: ignore[union-attr]


def test_openai_completes_and_lists(client: "openai.OpenAI") -> None:
    done = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=3)
    assert len(done.choices) == 2
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_openai_parses_a_schema_and_a_call(client: "openai.OpenAI") -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=90, response_format=form
    )
    assert json.loads(answer.choices[0].message.content or "")["count"] in (1, 22)
    tools: Any = [TOOL]
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=90, tools=tools, tool_choice="required",
        stream=True,
    )  # fmt: skip
    calls = [c for chunk in stream for c in chunk.choices[0].delta.tool_calls or ()]
    assert [c.function.name for c in calls if c.function and c.function.name] == ["f"]
    arguments = "".join(c.function.arguments or "" for c in calls if c.function)
    assert len(calls) > 3
    assert json.loads(arguments)["n"] in (1, 22)


def test_openai_raises_its_own_errors(client: "openai.OpenAI") -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError, match="the prompt is too long"):
        client.completions.create(model="tiny", prompt="x" * 40_000)
    with pytest.raises(openai.NotFoundError, match="no embeddings"):
        client.embeddings.create(model="tiny", input="x")


def test_openai_cancels(client: "openai.OpenAI", server: RunningServer) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=30000, temperature=0, stream=True
    )
    next(stream)
    server.wait_for("tandem_requests_running", 1)
    stream.close()
    server.wait_for("tandem_requests_running", 0)


def test_openai_responds_streams_and_goes_on(client: "openai.OpenAI") -> None:
    import openai

    fields: dict[str, Any] = {"model": "tiny", "max_output_tokens": 9, "temperature": 0}
    whole = client.responses.create(input="hello", **fields)
    with client.responses.stream(input="hello", **fields) as stream:
        events = list(stream)
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert events[-1].type == "response.incomplete"
    again = client.responses.create(input="go on", previous_response_id=whole.id, **fields)
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens > 0
    assert client.responses.retrieve(whole.id).output_text == whole.output_text
    client.responses.delete(whole.id)
    with pytest.raises(openai.BadRequestError, match="is not kept here"):
        client.responses.create(input="go on", previous_response_id=whole.id, **fields)


def test_openai_responds_with_a_schema_and_a_call(client: "openai.OpenAI") -> None:
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    answer = client.responses.create(model="tiny", input="hello", text=form)
    assert json.loads(answer.output_text)["count"] in (1, 22)
    tool: Any = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    with client.responses.stream(
        model="tiny", input="hello", tools=[tool], tool_choice="required"
    ) as stream:
        last = stream.get_final_response()
    (item,) = last.output
    assert item.type == "function_call"
    assert json.loads(item.arguments)["n"] in (1, 22)


@pytest.fixture(scope="module")
def messages(server: RunningServer) -> Any:
    import anthropic

    with anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0) as client:
        yield client


def test_anthropic_writes_streams_and_counts(messages: "anthropic.Anthropic") -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 9}
    fields["extra_body"] = {"temperature": 0}
    whole = messages.messages.create(**fields)
    with messages.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert [block.text for block in whole.content if block.type == "text"] == [text]
    assert last.stop_reason == whole.stop_reason == "max_tokens"
    counted = messages.messages.count_tokens(model="tiny", messages=MESSAGES)
    usage = last.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert [model.id for model in messages.models.list()] == ["tiny"]


def test_anthropic_calls_a_tool_and_takes_its_result(messages: "anthropic.Anthropic") -> None:
    tool: Any = {"name": "f", "input_schema": TOOL["function"]["parameters"]}  # type: ignore[index]
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 90, "tools": [tool]}
    with messages.messages.stream(
        **fields, messages=MESSAGES, tool_choice={"type": "any"}
    ) as stream:
        called = stream.get_final_message()
    (block,) = called.content
    assert block.type == "tool_use"
    assert block.input["n"] in (1, 22)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "blue"}
    turns: Any = [
        *MESSAGES, {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]  # fmt: skip
    answer = messages.messages.create(**fields, messages=turns)
    assert answer.stop_reason in ("max_tokens", "tool_use", "end_turn")


def test_anthropic_raises_its_own_errors(messages: "anthropic.Anthropic") -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match="the prompt is too long"):
        messages.messages.create(
            model="tiny", max_tokens=5, messages=[{"role": "user", "content": "x" * 40_000}]
        )
    with pytest.raises(anthropic.NotFoundError, match="there is no model"):
        messages.models.retrieve("other")


def test_hugging_face_chats_and_streams(server: RunningServer) -> None:
    with InferenceClient(base_url=f"{server.address}/v1", api_key="none") as client:
        fields: dict[str, Any] = {
            "model": "tiny", "messages": MESSAGES, "max_tokens": 9, "temperature": 0.0,
        }  # fmt: skip
        whole = client.chat_completion(**fields)
        chunks = list(client.chat_completion(**fields, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_streams(server: RunningServer) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": True}
    done = subprocess.run(
        ["curl", "-sN", f"{server.address}/v1/chat/completions",
         "-H", "Content-Type: application/json", "-d", json.dumps(body)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"


def test_the_example_streams_and_follows_a_schema(server: RunningServer, tmp_path: Path) -> None:
    *streamed, ruled = example("server_client.py", server.address, cache=tmp_path)
    assert streamed
    assert json.loads(ruled)["answer"] in ("yes", "no")

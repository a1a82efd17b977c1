"""Tests of the demo model behind the server, with a common client."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.demo.conftest import demo_cache  # noqa: F401
from tests.server.running import RunningServer, running_server
from tests.server.test_api import SCHEMA, TOOL

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.demo
QUESTIONS = ("Why is the sky blue?", "Name three colours.", "What is 2 + 2?", "Say hello.")


@pytest.fixture(scope="module")
def demo_server(demo_cache: Path) -> Iterator[RunningServer]:  # noqa: F811
    """A server with default options: experts and linear layers in bf16, as in the files."""
    with running_server("demo", "--context", "1024", cache=demo_cache) as running:
        yield running


@pytest.fixture(scope="module")
def client(demo_server: RunningServer) -> Any:
    import openai

    address = f"{demo_server.address}/v1"
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        yield client


def ask(client: "openai.OpenAI", text: str, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    fields = {"max_tokens": 24, "temperature": 0, **fields}
    return client.chat.completions.create(model="demo", messages=messages, **fields)


def test_four_at_once_are_answered_as_one_by_one(client: "openai.OpenAI") -> None:
    alone = [ask(client, text).choices[0].message.content for text in QUESTIONS]
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        together = list(pool.map(lambda text: ask(client, text), QUESTIONS))
    assert [answer.choices[0].message.content for answer in together] == alone
    assert "sky" in alone[0]


def test_a_stream_a_schema_and_a_call(client: "openai.OpenAI") -> None:
    stream = ask(client, "Count to five.", stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == ask(client, "Count to five.").choices[0].message.content
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    found = json.loads(
        ask(client, "Name a thing.", response_format=form, max_tokens=60).choices[0].message.content
    )
    assert found["count"] in (1, 22)
    called = ask(client, "Call f.", tools=[TOOL], tool_choice="required", max_tokens=60)
    (call,) = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["n"] in (1, 22)

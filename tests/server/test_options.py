"""Tests of the server's options without a model: names, strictness."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from tandem.core.errors import ConfigError
from tandem.engine.messages import EngineSettings
from tandem.server.app import create_app
from tandem.server.engine_client import EngineClient
from tandem.server.options import ServerOptions
from tandem.server.service import Server
from tests.server.checkpoint import never_called

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
def client(tokenizer: Any) -> Iterator[Callable[..., TestClient]]:
    """A factory of clients for servers that still load: valid requests get a 503."""
    engine = EngineClient(
        never_called, EngineSettings(max_running=1, part_tokens=16), max_waiting=0
    )
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> TestClient:
            server = Server(engine, tokenizer, ServerOptions(**options), "tiny")
            stack.callback(server.close)
            return TestClient(create_app(server, allowed_hosts=None))

        yield make


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "tandem.server"):
        yield caplog


def test_a_strict_server_refuses_what_it_does_not_know(client: Any) -> None:
    strict = client(strict=True)
    cached = [{"role": "user", "content": "x", "cache_control": {}}]
    for fields, words in (
        ({"temprature": 1}, "unknown field 'temprature'; did you mean 'temperature'?"),
        ({"messages": cached}, "unknown field 'cache_control'"),
        ({"model": "other"}, "there is no model 'other' here; this server has 'tiny'"),
    ):
        reply = strict.post(CHAT, json={**BODY, **fields})
        assert reply.status_code in (400, 404)
        assert words in reply.json()["error"]["message"]
    assert strict.post(CHAT, json={**BODY, "functions": None}).status_code == 503
    assert client().post(CHAT, json={**BODY, "temprature": 1}).status_code == 503


def test_the_names_of_a_model_are_those_that_were_given(client: Any) -> None:
    named = client(served_model_name="one, two")
    for name, status in (("one", 503), ("two", 503), ("", 503), ("tiny", 404), ("gpt-4o", 404)):
        assert named.post(CHAT, json={**BODY, "model": name}).status_code == status
    assert [model["id"] for model in named.get("/v1/models").json()["data"]] == ["one", "two"]
    assert named.get("/v1/models/two").json()["id"] == "two"
    assert named.get("/v1/models/tiny").status_code == 404


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"served_model_name": " , "}, "served_model_name has no name"),
        ({"context_full": "explode"}, "context_full is 'explode'; expected stop or trim"),
    ],
)
def test_options_that_cannot_be_are_told(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerOptions(**fields)


def test_a_refusal_is_one_line_of_log_without_the_prompt(
    client: Any, log: pytest.LogCaptureFixture
) -> None:
    posting = client()
    secret = [{"role": "my secret pony", "content": "my secret pony"}]
    posting.post(CHAT, json={"messages": secret})
    posting.post(CHAT, json=BODY)
    lines = [record.getMessage() for record in log.records if record.name == "tandem.server"]
    refused = f"refused POST {CHAT}"
    expected = "'system', 'developer', 'user', 'assistant' or 'tool'"
    assert lines == [
        f"{refused}: 400, messages.0.role is not {expected}",
        f"{refused}: 503, the model is being loaded; ask again soon",
    ]

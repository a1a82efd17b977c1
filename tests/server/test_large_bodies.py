"""Tests of bodies that are slow to parse: other requests do not wait."""

import contextlib
import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from tandem.apis.anthropic.schemas import MessagesRequest
from tandem.apis.errors import ApiError
from tandem.apis.reading import read_body
from tandem.apis.responses.schemas import ResponsesRequest
from tandem.apis.schemas import ChatRequest, CompletionRequest
from tandem.server.app import BODIES
from tests.server.running import RunningServer

MANY = 300_000
NAMES = [str(number) for number in range(99_000)]
HELLO = [{"role": "user", "content": "hello"}]


def read(raw: bytes, kind: Any = CompletionRequest) -> Any:
    return read_body(kind, raw, is_strict=False).body


@pytest.mark.parametrize(
    "values", ["[],", "{},", '"",', '"\\\\",', '{"a":1},', '"\\"",'], ids=lambda text: text[:-1]
)
def test_a_body_of_many_values_is_refused_before_it_is_parsed(values: str) -> None:
    raw = f'{{"prompt": "x", "other": [{values * MANY}1]}}'.encode()
    with pytest.raises(ApiError, match="strings, lists and objects"):
        read(raw)


def test_what_is_within_strings_is_no_value() -> None:
    text = "[{,\\" * MANY + '"'
    assert read(json.dumps({"prompt": text}).encode()).prompt == text


def test_prompts_of_many_tokens_are_read() -> None:
    ids = list(range(200_000))
    assert read(json.dumps({"prompt": ids}).encode()).prompt == ids
    with pytest.raises(ApiError, match="more than 1000000 numbers"):
        read(b'{"prompt": [' + b"5," * 1_000_001 + b"5]}")


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_a_list_is_checked_up_to_its_first_wrong_element(kind: type[BaseModel]) -> None:
    """Each error costs much more time than its bytes."""
    wrongs: tuple[Any, ...] = ({"a": 1}, [{}], "x", 5.5, True)
    for name, field in kind.model_fields.items():
        for wrong in wrongs:
            with pytest.raises(ValidationError) as found:
                kind.model_validate({field.alias or name: [wrong] * 1000, "junk": 1})
            assert found.value.error_count() < 60, (name, wrong)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text"}] * 1000}]}),
        (ResponsesRequest, {"input": [{"role": "user", "content": [{"type": "x"}] * 1000}]}),
        (MessagesRequest, {"messages": [{"role": "user", "content": [{"type": "x"}] * 1000}],
                           "max_tokens": 1}),
    ],
)  # fmt: skip
def test_inner_lists_are_too(kind: type[BaseModel], data: Any) -> None:
    with pytest.raises(ValidationError) as found:
        kind.model_validate(data)
    assert found.value.error_count() < 60


def test_large_wrong_bodies_are_refused(server: RunningServer) -> None:
    """The first one once took 171 seconds to parse, during which nothing else ran."""
    bodies: list[tuple[str, Any]] = [
        ("/v1/responses", {"input": [{"a": 1}] * 33_000}),
        ("/v1/completions", {"prompt": ["x"] * 99_000}),
        ("/v1/chat/completions", {"messages": HELLO, "logit_bias": dict.fromkeys(NAMES, 1)}),
    ]  # fmt: skip
    for path, body in bodies:
        assert server.ask("POST", path, body).status == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_text_that_no_context_takes_is_refused_by_its_length(
    server: RunningServer, path: str
) -> None:
    refused = server.ask("POST", path, {"prompt": " " * 3_000_000})
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length" in refused.error["message"]


def test_a_body_that_does_not_say_its_length_has_a_limit_too(server: RunningServer) -> None:
    pieces = (b" " * (1 << 20) for _ in range(6))
    with contextlib.closing(server.connect()) as connection:
        connection.request(
            "POST", "/v1/completions", pieces, {"Content-Type": "application/json"},
            encode_chunked=True,
        )  # fmt: skip
        response = connection.getresponse()
        assert response.status == 413
        assert "larger than 4194304 bytes" in json.load(response)["error"]["message"]
    server.wait_for_log("refused POST /v1/completions: 413")

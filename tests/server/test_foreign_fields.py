"""Tests of fields of other servers' clients: followed, ignored with a log line, or refused."""

import dataclasses
import json
from typing import Any

import pytest

from tandem.apis.reading import read_body
from tandem.apis.schemas import CompletionRequest
from tandem.generate.sampling import SamplingOptions
from tests.server.running import Reply, RunningServer
from tests.server.test_api import SCHEMA


def test_what_is_called_as_an_option_is_handed_on_as_it_is() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.4, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5,
        "seed": 7, "stop": ("a",), "stop_token_ids": (4,), "ignore_eos": True, "min_tokens": 2,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": ((5, 1.5),),
    }  # fmt: skip
    options = SamplingOptions(max_new_tokens=9, **fields)
    assert set(fields) == {one.name for one in dataclasses.fields(options)} - {"max_new_tokens"}
    fields |= {"logit_bias": {"5": 1.5}, "max_tokens": 30, "prompt": "x"}
    raw = json.dumps(fields).encode()
    body = read_body(CompletionRequest, raw, is_strict=True).body
    assert body.request([1, 2], room=9).options == options


def test_nulls_are_absent_and_unknown_fields_are_logged_once(server: RunningServer) -> None:
    cached = [
        {"role": "user", "content": "x", "cache_control": {"type": "ephemeral"}, "name": None}
    ]
    body = {
        "messages": cached, "max_tokens": 2, "functions": None, "stop": None, "mirostat": 2,
        "unheard_of": None, "temprature": "my secret pony",
    }  # fmt: skip
    for _ in range(2):
        assert server.post("/v1/chat/completions", **body).ok
    (line,) = [line for line in server.log.splitlines() if "mirostat" in line]
    assert "ignored" in line
    assert "'cache_control'" in line
    assert "'temprature' (did you mean 'temperature'?)" in line
    assert "unheard_of" not in server.log
    assert "pony" not in server.log


def test_guidellm_and_aiperf_are_answered(server: RunningServer) -> None:
    """The end token is ignored, and every chunk has the number of tokens so far."""
    fields: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    free = server.chat(**fields).text
    stopping: Reply = server.chat(**fields, stop_token_ids=[ord(free[3]) - 32])
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = server.chat(
        **fields, ignore_eos=True, min_tokens=12, stop=None, stream=True, stream_options=options
    )
    assert reply.streamed_texts == [free]
    counts = [event["usage"]["completion_tokens"] for event in reply.events]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert stopping.status == 200
    events = server.complete(max_tokens=3, stream=True, stream_options=options).events
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]


def test_limits_and_penalties_have_other_names(server: RunningServer) -> None:
    assert server.complete(n_predict=5).ok["usage"]["completion_tokens"] == 5
    assert server.complete(n_predict=5, max_tokens=3).ok["usage"]["completion_tokens"] == 3
    assert server.chat(n_predict=4).json["usage"]["completion_tokens"] == 4
    texts = [
        server.complete(max_tokens=30, **{name: 5.0}).ok["choices"][0]["text"]
        for name in ("repetition_penalty", "repeat_penalty")
    ]
    assert texts[0] == texts[1] != server.complete(max_tokens=30).ok["choices"][0]["text"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_choice": ["alpha", "beta"]}, {"alpha", "beta"}),
        ({"structured_outputs": {"choice": ["alpha", "beta"]}}, {"alpha", "beta"}),
        ({"guided_regex": "(7|9){3}"}, {a + b + c for a in "79" for b in "79" for c in "79"}),
        ({"structured_outputs": {"regex": "u[vw]"}}, {"uv", "uw"}),
        ({"guided_grammar": 'start: "x" "y"'}, {"xy"}),
        ({"structured_outputs": {"grammar": 'root ::= "p" [qr]'}}, {"pq", "pr"}),
        ({"grammar": 'root ::= "p" [qr]'}, {"pq", "pr"}),
    ],
)
def test_a_guide_rules_chats_and_completions(
    server: RunningServer, fields: dict[str, Any], expected: set[str]
) -> None:
    assert server.chat(max_tokens=20, temperature=1.0, **fields).text in expected
    assert server.complete(max_tokens=20, **fields).ok["choices"][0]["text"] in expected


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"json_schema": SCHEMA},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
    ],
)
def test_a_schema_rules_wherever_it_stands(server: RunningServer, fields: dict[str, Any]) -> None:
    chat = server.chat(max_tokens=90, temperature=1.0, seed=2, **fields).text
    text = server.complete(max_tokens=90, **fields).ok["choices"][0]["text"]
    assert [set(json.loads(found)) for found in (chat, text)] == [{"count", "name"}] * 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guided_regex": "("}, "regular expression cannot be followed"),
        ({"guided_grammar": "?? ::= ((("}, "grammar cannot be followed"),
        ({"guided_json": "no"}, "not a JSON object"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex and guided_choice are given"),
        ({"stop_token_ids": [999]}, "token id 999 is unknown"),
    ],
)
def test_a_guide_that_cannot_be_followed_is_told(
    server: RunningServer, fields: dict[str, Any], words: str
) -> None:
    reply = server.chat(**fields)
    assert reply.status == 400
    assert words in reply.error["message"]


def test_templates_get_the_fields_that_clients_send(server: RunningServer) -> None:
    def prompt_tokens(**fields: Any) -> int:
        return int(server.chat(max_tokens=1, **fields).ok["usage"]["prompt_tokens"])

    free = prompt_tokens()
    assert prompt_tokens(add_generation_prompt=False) < free
    assert prompt_tokens(chat_template_kwargs={"add_generation_prompt": False}) < free
    assert prompt_tokens(enable_thinking=False, skip_special_tokens=False) == free


def test_a_strict_schema_is_closed(server: RunningServer) -> None:
    schema: dict[str, Any] = {
        "type": "object", "required": ["a"],
        "properties": {"a": {"type": "object", "properties": {"b": {"type": "boolean"}}}},
    }  # fmt: skip
    form = {"name": "x", "schema": schema, "strict": True}
    for seed in range(4):
        reply = server.chat(
            max_tokens=60, temperature=1.5, seed=seed,
            response_format={"type": "json_schema", "json_schema": form},
        )  # fmt: skip
        found = json.loads(reply.text)
        assert set(found) == {"a"}
        assert set(found["a"]) <= {"b"}


def test_any_name_is_answered_by_the_only_model(server: RunningServer) -> None:
    reply = server.chat(model="gpt-4o", max_tokens=1)
    assert (reply.status, reply.json["model"]) == (200, "tiny")
    server.wait_for_log("requests for model gpt-4o are answered by 'tiny'")


def test_what_is_refused_leaves_a_line(server: RunningServer) -> None:
    server.ask("GET", "/nothing%1b%0a")
    server.ask("DELETE", "/v1/models")
    server.ask("GET", "/v1/models/none")
    server.ask("POST", "/v1/completions", b"{}", {"Content-Type": "text/plain"})
    server.ask("GET", "/v1/models", headers={"Host": "evil.example"})
    for line in (
        "refused GET /nothing  : 404, Not Found",
        "refused DELETE /v1/models: 405, Method Not Allowed",
        "refused GET /v1/models/none: 404, there is no model 'none'",
        "refused POST /v1/completions: 415, the body must be JSON",
        "refused GET /v1/models: 403, this server is called by its own address",
    ):
        server.wait_for_log(line)

"""Tests of the API over plain HTTP: answers, and the words of refusals."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.checkpoint import CONTEXT
from tests.server.running import RunningServer

SCHEMA = {
    "type": "object",
    "properties": {"count": {"enum": [1, 22]}, "name": {"type": "string", "maxLength": 5}},
    "required": ["count", "name"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"],
    "additionalProperties": False,
}}}  # fmt: skip


def test_an_answer_is_as_openai_writes_it(server: RunningServer) -> None:
    reply = server.chat(max_tokens=8, temperature=0)
    answer = reply.json
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8


def test_a_stream_is_the_same_answer(server: RunningServer) -> None:
    fields: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    whole = server.chat(**fields).text
    reply = server.chat(**fields, stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.streamed_texts == [whole]
    assert reply.events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert reply.events[-2]["choices"][0]["finish_reason"] == "length"
    assert reply.events[-1]["usage"]["completion_tokens"] == 12


def test_requests_at_once_get_what_they_get_alone(server: RunningServer) -> None:
    fields: list[dict[str, Any]] = [
        {"text": "a" * n, "max_tokens": 20, "temperature": 1.0, "seed": n} for n in range(9)
    ]

    def ask(one: dict[str, Any]) -> str:
        return server.chat(**one).text

    with ThreadPoolExecutor(len(fields)) as clients:
        assert [*clients.map(ask, fields)] == [*map(ask, fields)]


def test_a_seed_repeats_and_another_does_not(server: RunningServer) -> None:
    first, again, other = (
        server.chat(max_tokens=16, temperature=1.0, seed=seed).text for seed in (5, 5, -6)
    )
    assert first == again != other


def test_stop_strings_end_the_answer_before_them(server: RunningServer) -> None:
    free = server.chat(max_tokens=30, temperature=0).text
    stop = free[6:8]
    reply = server.chat(max_tokens=30, temperature=0, stop=[stop, "never comes"])
    assert reply.text == free.partition(stop)[0]
    assert reply.json["choices"][0]["finish_reason"] == "stop"


def test_a_conversation_goes_on_without_computing_its_beginning_again(
    server: RunningServer,
) -> None:
    first = server.chat("tell me more", max_tokens=8, temperature=0)
    messages = [
        {"role": "user", "content": "tell me more"},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "go on"},
    ]
    usage = server.chat(messages=messages, max_tokens=4, temperature=0).ok["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= first.json["usage"]["prompt_tokens"]


def test_logprobs_are_of_the_tokens(server: RunningServer) -> None:
    reply = server.chat(max_tokens=5, temperature=0, logprobs=True, top_logprobs=2)
    tokens = reply.json["choices"][0]["logprobs"]["content"]
    assert len(tokens) == 5
    for token in tokens:
        best, second = token["top_logprobs"]
        assert token["token"] == best["token"]
        assert token["logprob"] == best["logprob"] >= second["logprob"]
    (old,) = server.complete("a", max_tokens=3, logprobs=1).ok["choices"]
    assert len(old["logprobs"]["token_logprobs"]) == 3


def test_completions_answer_text_ids_and_several_of_them(server: RunningServer) -> None:
    one = server.complete(max_tokens=6).ok["choices"][0]["text"]
    two = server.complete(["xyz", "abc"], max_tokens=6).ok
    assert [choice["index"] for choice in two["choices"]] == [0, 1]
    assert two["choices"][1]["text"] == one
    assert two["usage"]["completion_tokens"] == 12
    streamed = server.complete(["xyz", "abc"], max_tokens=6, stream=True)
    assert streamed.streamed_texts == [choice["text"] for choice in two["choices"]]
    ids = server.complete([69, 70, 71], max_tokens=6).ok
    assert ids["usage"]["prompt_tokens"] == 3


def test_a_schema_is_followed(server: RunningServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        reply = server.chat(max_tokens=90, temperature=1.0, seed=seed, response_format=form)
        found = json.loads(reply.text)
        assert set(found) == {"count", "name"}
        assert found["count"] in (1, 22)
        assert reply.json["choices"][0]["finish_reason"] == "stop"


def test_json_object_is_json_from_its_first_token(server: RunningServer) -> None:
    reply = server.chat(max_tokens=12, temperature=1.0, response_format={"type": "json_object"})
    assert reply.text.startswith("{")


def test_a_tool_that_must_be_called_is_called(server: RunningServer) -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 80}
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        fields["tool_choice"] = choice
        (answer,) = server.chat("x", **fields).ok["choices"]
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] == "f"
        assert json.loads(call["function"]["arguments"])["n"] in (1, 22)
        assert answer["finish_reason"] == "tool_calls"
        assert answer["message"]["content"] is None


def test_tools_that_may_be_called_change_no_plain_answer(server: RunningServer) -> None:
    """The grammar applies to calls, not to the text before them: see test_grammar."""
    fields: dict[str, Any] = {"tools": [TOOL], "max_tokens": 6, "temperature": 0}
    free = server.chat(**fields).text
    assert server.chat(**fields, tool_choice="auto").text == free
    assert server.chat(**fields, parallel_tool_calls=False).text == free
    loose = {"type": "function", "function": {"name": "g", "parameters": {"type": 5}}}
    assert server.chat(tools=[loose], max_tokens=2).status == 200
    loose["function"]["strict"] = True  # type: ignore[index]
    assert server.chat(tools=[loose], max_tokens=2).status == 400


def test_a_format_and_tools_give_the_one_or_the_other(server: RunningServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for seed in range(3):
        reply = server.chat(
            tools=[TOOL], response_format=form, max_tokens=120, temperature=1.0, seed=seed
        )
        message = reply.json["choices"][0]["message"]
        if message.get("tool_calls"):
            (call,) = message["tool_calls"]
            assert json.loads(call["function"]["arguments"])["n"] in (1, 22)
        else:
            assert json.loads(message["content"])["count"] in (1, 22)


def test_choices_differ_and_repeat_with_their_seed(server: RunningServer) -> None:
    fields: dict[str, Any] = {"n": 3, "max_tokens": 9, "temperature": 1.0, "seed": 3}
    whole = server.chat(**fields).json
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    first = server.chat(**{**fields, "n": 1}).json
    assert texts[0] == first["choices"][0]["message"]["content"]
    assert whole["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]
    assert whole["usage"]["completion_tokens"] == 27
    streamed = server.chat(**fields, stream=True)
    assert streamed.streamed_texts == texts
    choices = [choice for event in streamed.events for choice in event["choices"]]
    assert sorted(one["index"] for one in choices if one["finish_reason"]) == [0, 1, 2]
    several = server.complete(["a", "b"], n=2, max_tokens=3, temperature=1.0, seed=1).ok
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert several["usage"]["prompt_tokens"] == 2


def test_penalties_and_biases_are_followed(server: RunningServer) -> None:
    """A greedy random model repeats itself; a penalty or bias prevents a repeated token."""
    fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "logprobs": True}

    def tokens(**more: Any) -> list[str]:
        (choice,) = server.chat(**fields, **more).ok["choices"]
        return [one["token"] for one in choice["logprobs"]["content"]]

    free = tokens()
    assert tokens(presence_penalty=2.0, frequency_penalty=2.0) != free
    assert len(set(tokens(logit_bias={"60": 100}))) == 1
    banned = {str(number): -100 for number in range(128) if number != 61}
    assert tokens(logit_bias=banned) == tokens(logit_bias={"61": 100})


def test_what_clients_send_beside_is_taken(server: RunningServer) -> None:
    """Fields that change no answer, as OpenAI's clients and their derivatives send them."""
    called = {"id": "c", "index": 0, "type": "function", "function": {"name": "f", "arguments": ""}}
    body = {
        "model": "tiny", "stream": False, "n": 1, "max_tokens": -1, "max_completion_tokens": 3,
        "temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "stop": None,
        "logit_bias": {}, "logprobs": False, "user": "u", "store": True, "metadata": {"a": "b"},
        "service_tier": "flex", "safety_identifier": "x", "prompt_cache_key": "k", "tools": [TOOL],
        "tool_choice": "auto", "parallel_tool_calls": True, "verbosity": "medium",
        "prediction": {"type": "content", "content": "x"}, "modalities": ["text"], "seed": 7,
        "messages": [
            {"role": "developer", "content": "Be short."},
            {"role": "user", "name": "me", "content": [
                {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "c", "content": "22"},
        ],
    }  # fmt: skip
    answer = server.post("/v1/chat/completions", **body).ok
    assert answer["usage"]["completion_tokens"] == 3


def test_a_prompt_that_is_too_long_is_told_in_numbers(server: RunningServer) -> None:
    error = server.chat("x" * 40_000).error
    assert error["code"] == "context_length_exceeded"
    assert "40" in error["message"]
    assert f"this model's maximum context length is {CONTEXT} tokens" in error["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"best_of": 3}, "best_of is not supported"),
        ({"suffix": "x"}, "suffix is not supported"),
        ({"functions": [{}]}, "functions is not supported; describe them in tools"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens is '9'; expected an integer or -1"),
        ({"n": 17}, "n is 17; expected a number of at most 16"),
        ({"stop": 5}, "stop is 5; expected a string or a list"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0 is 5"),
        ({"messages": None}, "messages is missing"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"999": 1}}, "token id 999 is unknown; this model's are 0 to 127"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"verbosity": "low"}, "verbosity"),
        ({"top_logprobs": 3}, "needs logprobs"),
        ({"stop": [""]}, "stop"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"response_format": {"type": "json_schema"}}, "needs json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
            "cannot be followed",
        ),
        ({"chat_template_kwargs": {"tokenize": True}}, "must not set"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "x": 1}]}]},
            "the message holds a part of type 'input_audio', which no model here reads",
        ),
    ],
)
def test_a_bad_field_is_named(server: RunningServer, fields: dict[str, Any], words: str) -> None:
    reply = server.chat(**fields)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert words in reply.error["message"]


def test_errors_have_their_status(server: RunningServer) -> None:
    assert server.ask("GET", "/v1/models/none").status == 404
    assert server.ask("GET", "/nothing").status == 404
    assert server.ask("GET", "/v1/chat/completions").status == 405
    refused = server.ask("POST", "/v1/embeddings", {"input": "x"})
    assert (refused.status, refused.error["code"]) == (404, "unsupported_endpoint")
    assert server.complete([9999]).status == server.complete("").status == 400


def test_bodies_that_are_no_requests_are_refused(server: RunningServer) -> None:
    path = "/v1/chat/completions"
    for body in (b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"messages": ' + b"[" * 100_000):
        assert server.ask("POST", path, body).status == 400, body[:20]
    surrogate = b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 2}'
    assert server.ask("POST", path, surrogate).status == 400
    plain = server.ask("POST", path, b"{}", {"Content-Type": "text/plain"})
    assert plain.status == 415
    assert server.ask("POST", path, b"x" * (5 << 20)).status == 413


def test_a_page_elsewhere_cannot_reach_the_server(server: RunningServer) -> None:
    assert server.ask("GET", "/v1/models", headers={"Host": "evil.example:80"}).status == 403
    reply = server.ask("GET", "/v1/models", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in reply.headers


def test_models_health_ready_and_metrics(server: RunningServer) -> None:
    (model,) = server.ask("GET", "/v1/models").json["data"]
    assert model["id"] == "tiny"
    assert server.ask("GET", "/v1/models/tiny").json == model
    assert server.ask("GET", "/health").status == 200
    assert server.ask("GET", "/ready").status == 200
    for path in ("/v1/models", "/health", "/ready", "/metrics", "/"):
        head = server.ask("HEAD", path)
        assert (head.status, head.body) == (200, b""), path
    assert server.ask("HEAD", "/live").status == 405
    assert server.ask("HEAD", "/v1/models/none").status == 404
    before = server.metric("tandem_generated_tokens_total")
    server.chat(max_tokens=7, temperature=0)
    server.wait_for("tandem_generated_tokens_total", before + 7)
    assert server.metric("tandem_rows_on_cpu_total") > 0
    assert server.metric('tandem_memory_bytes{kind="experts"}') > 0


def test_nothing_of_a_prompt_is_in_the_log(server: RunningServer) -> None:
    assert server.chat("my secret pony", max_tokens=2).status == 200
    assert server.chat("my secret pony", max_tokens="my secret pony").status == 400
    messages = [{"role": "my secret pony", "content": 5}]
    assert server.ask("POST", "/v1/chat/completions", {"messages": messages}).status == 400
    server.wait_for_log("chat 200")
    server.wait_for_log("refused POST /v1/chat/completions: 400, max_tokens is not an integer")
    assert "pony" not in server.log

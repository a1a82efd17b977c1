"""The API over plain HTTP: what is answered, and what is refused with which words."""

import json
import threading
from typing import Any

import pytest

from tests.server.checkpoint import CONTEXT
from tests.server.running import Reply, RunningServer

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


def text_of(reply: Reply) -> str:
    assert reply.status == 200, reply.body
    text: str = reply.json["choices"][0]["message"]["content"]
    return text


def streamed_text(reply: Reply) -> str:
    chunks = [event["choices"][0]["delta"] for event in reply.events if event["choices"]]
    return "".join(chunk.get("content") or "" for chunk in chunks)


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
    whole = text_of(server.chat(**fields))
    reply = server.chat(**fields, stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert streamed_text(reply) == whole
    assert reply.events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert reply.events[-2]["choices"][0]["finish_reason"] == "length"
    assert reply.events[-1]["usage"]["completion_tokens"] == 12


def test_requests_at_once_get_what_they_get_alone(server: RunningServer) -> None:
    fields = [{"text": "a" * n, "max_tokens": 20, "temperature": 1.0, "seed": n} for n in range(9)]
    alone = [text_of(server.chat(**f)) for f in fields]  # type: ignore[arg-type]
    together = [""] * len(fields)

    def ask(number: int) -> None:
        together[number] = text_of(server.chat(**fields[number]))  # type: ignore[arg-type]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(fields))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_a_seed_repeats_and_another_does_not(server: RunningServer) -> None:
    first, again, other = (
        text_of(server.chat(max_tokens=16, temperature=1.0, seed=seed)) for seed in (5, 5, -6)
    )
    assert first == again != other


def test_stop_strings_end_the_answer_before_them(server: RunningServer) -> None:
    free = text_of(server.chat(max_tokens=30, temperature=0))
    stop = free[6:8]
    reply = server.chat(max_tokens=30, temperature=0, stop=[stop, "never comes"])
    assert text_of(reply) == free.partition(stop)[0]
    assert reply.json["choices"][0]["finish_reason"] == "stop"


def test_a_conversation_goes_on_without_computing_its_beginning_again(
    server: RunningServer,
) -> None:
    first = server.chat("tell me more", max_tokens=8, temperature=0)
    messages = [
        {"role": "user", "content": "tell me more"},
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "go on"},
    ]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    usage = server.ask("POST", "/v1/chat/completions", body).json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= first.json["usage"]["prompt_tokens"]


def test_logprobs_are_of_the_tokens(server: RunningServer) -> None:
    reply = server.chat(max_tokens=5, temperature=0, logprobs=True, top_logprobs=2)
    tokens = reply.json["choices"][0]["logprobs"]["content"]
    assert len(tokens) == 5
    for token in tokens:
        best, second = token["top_logprobs"]
        assert token["token"] == best["token"]
        assert token["logprob"] == best["logprob"] >= second["logprob"]
    old = server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 3, "logprobs": 1})
    assert len(old.json["choices"][0]["logprobs"]["token_logprobs"]) == 3


def test_completions_answer_text_ids_and_several_of_them(server: RunningServer) -> None:
    def ask(prompt: Any, **fields: Any) -> Reply:
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, **fields}
        return server.ask("POST", "/v1/completions", body)

    one = ask("abc").json["choices"][0]["text"]
    two = ask(["xyz", "abc"]).json
    assert [choice["index"] for choice in two["choices"]] == [0, 1]
    assert two["choices"][1]["text"] == one
    assert two["usage"]["completion_tokens"] == 12
    streamed = ask(["xyz", "abc"], stream=True).events
    texts = ["", ""]
    for event in streamed:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in two["choices"]]
    ids = ask([69, 70, 71]).json
    assert ids["usage"]["prompt_tokens"] == 3


def test_a_schema_is_followed(server: RunningServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        reply = server.chat(max_tokens=90, temperature=1.0, seed=seed, response_format=form)
        found = json.loads(text_of(reply))
        assert set(found) == {"count", "name"}
        assert found["count"] in (1, 22)
        assert reply.json["choices"][0]["finish_reason"] == "stop"


def test_json_object_is_json_from_its_first_token(server: RunningServer) -> None:
    reply = server.chat(max_tokens=12, temperature=1.0, response_format={"type": "json_object"})
    assert text_of(reply).startswith("{")


def test_a_tool_that_must_be_called_is_called(server: RunningServer) -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 80}
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        fields["tool_choice"] = choice
        reply = server.chat("x", **fields)
        assert reply.status == 200, reply.body
        (answer,) = reply.json["choices"]
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] == "f"
        assert json.loads(call["function"]["arguments"])["n"] in (1, 22)
        assert answer["finish_reason"] == "tool_calls"
        assert answer["message"]["content"] is None


def test_tools_that_may_be_called_change_no_plain_answer(server: RunningServer) -> None:
    """The calls are ruled, the text before them is not: see test_grammar."""
    fields: dict[str, Any] = {"tools": [TOOL], "max_tokens": 6, "temperature": 0}
    free = text_of(server.chat(**fields))
    assert text_of(server.chat(**fields, tool_choice="auto")) == free
    assert text_of(server.chat(**fields, parallel_tool_calls=False)) == free
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
    streamed = ["", "", ""]
    ends = []
    for event in server.chat(**fields, stream=True).events:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content") or ""
            ends += [choice["index"]] if choice["finish_reason"] else []
    assert (streamed, sorted(ends)) == (texts, [0, 1, 2])
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "temperature": 1.0, "seed": 1}
    several = server.ask("POST", "/v1/completions", body).json
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert several["usage"]["prompt_tokens"] == 2


def test_penalties_and_biases_are_followed(server: RunningServer) -> None:
    """A greedy random model repeats itself; a token that has come may be kept from coming again."""
    fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "logprobs": True}

    def tokens(**more: Any) -> list[str]:
        reply = server.chat(**fields, **more)
        assert reply.status == 200, reply.body
        return [one["token"] for one in reply.json["choices"][0]["logprobs"]["content"]]

    free = tokens()
    assert tokens(presence_penalty=2.0, frequency_penalty=2.0) != free
    assert len(set(tokens(logit_bias={"60": 100}))) == 1
    banned = {str(number): -100 for number in range(128) if number != 61}
    assert tokens(logit_bias=banned) == tokens(logit_bias={"61": 100})


def test_what_clients_send_beside_is_taken(server: RunningServer) -> None:
    """Fields that change no answer, as OpenAI's own clients and those built on them send them."""
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
    reply = server.ask("POST", "/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    assert reply.json["usage"]["completion_tokens"] == 3


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
    assert server.ask("POST", "/v1/completions", {"prompt": [9999]}).status == 400
    assert server.ask("POST", "/v1/completions", {"prompt": ""}).status == 400


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

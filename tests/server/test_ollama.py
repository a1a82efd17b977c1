"""Tests of Ollama's API: meaning of bodies, form of answers, refusals."""

import json
import pickle
from typing import Any

import pytest

from tandem.apis.answering import GenerationRequest
from tandem.apis.api import Surroundings
from tandem.apis.errors import ApiError
from tandem.apis.ollama.conversation import chat_of, generated_chat, raw_completion
from tandem.apis.ollama.reply import OllamaReply
from tandem.apis.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest
from tandem.apis.reading import read_body
from tandem.apis.schemas import ChatRequest
from tandem.dialects.coming_call import AnswerPart, Call
from tandem.generate.request import Request
from tandem.generate.token_output import TokenLogprob
from tests.server.running import Reply, RunningServer
from tests.server.test_anthropic import Scripted, token
from tests.server.test_api import SCHEMA, TOOL

HELLO: Any = [{"role": "user", "content": "hello"}]
FEW: Any = {"num_predict": 5, "temperature": 0}


def chat(**fields: Any) -> ChatRequest:
    raw = json.dumps({"model": "tiny:latest", "messages": HELLO, **fields}).encode()
    return chat_of(read_body(OllamaChatRequest, raw, is_strict=True).body)


def generate(**fields: Any) -> OllamaGenerateRequest:
    raw = json.dumps({"model": "tiny", "prompt": "hello", **fields}).encode()
    return read_body(OllamaGenerateRequest, raw, is_strict=True).body


def lines(reply: Reply) -> list[dict[str, Any]]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.body.splitlines()]


def test_a_conversation_with_tools_and_images_means_the_same_chat() -> None:
    call = {"function": {"name": "f", "arguments": {"n": 1}}}
    found = chat(
        messages=[
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "look", "images": ["QUJD"]},
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call, call]},
            {"role": "tool", "content": "blue", "tool_name": "f"},
            {"role": "tool", "content": "red"},
        ],
        tools=[TOOL],
        think="max",
    )
    _, user, answer, first, second = found.messages
    assert [part.type for part in user.content or () if not isinstance(part, str)] == [
        "image_url", "text",
    ]  # fmt: skip
    assert "data:image;base64,QUJD" in str(user.content)
    assert answer.reasoning_content == "hm"
    assert [c.id for c in answer.tool_calls or ()] == [first.tool_call_id, second.tool_call_id]
    assert first.tool_call_id != second.tool_call_id
    assert found.tools is not None
    assert (found.enable_thinking, found.reasoning_effort) == (True, "xhigh")


def test_options_and_forms_are_the_chats_own() -> None:
    options = {"num_predict": 7, "seed": 5, "top_k": 3, "repeat_penalty": 1.1, "stop": ["END"]}
    found = chat(options={**options, "num_ctx": 4096, "num_thread": 8}, keep_alive="5m")
    assert (found.max_tokens, found.seed, found.top_k, found.stop) == (7, 5, 3, ["END"])
    assert found.repeat_penalty == 1.1
    assert chat(options={"num_predict": -1, "seed": -1}).max_tokens is None
    assert chat(format="").response_format is None
    plain, ruled = chat(format="json").response_format, chat(format=SCHEMA).response_format
    assert plain is not None
    assert plain.type == "json_object"
    assert ruled is not None
    assert ruled.json_schema is not None
    assert ruled.json_schema.json_schema == SCHEMA
    assert chat(messages=[*HELLO, {"role": "assistant", "content": "I"}]).continue_final_message


def test_a_prompt_is_a_chat_and_a_raw_one_a_completion() -> None:
    found = generated_chat(generate(system="Be short.", images=["QUJD"], think=False))
    assert [message.role for message in found.messages] == ["system", "user"]
    assert found.enable_thinking is False
    raw = raw_completion(generate(raw=True, options=FEW, format="json", logprobs=True))
    assert (raw.prompt, raw.max_tokens, raw.logprobs) == ("hello", 5, 0)
    with pytest.raises(ApiError, match="raw takes the prompt as it is"):
        raw_completion(generate(raw=True, system="x"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"options": {"mirostat": 1}}, "mirostat is not supported; use temperature"),
        ({"options": {"repeat_last_n": 5}}, "repeat_last_n is not supported"),
        ({"options": {"temperature": "hot"}}, "options.temperature is 'hot'; expected a number"),
        ({"template": "{{ x }}"}, "template is not supported"),
        ({"format": "xml"}, 'neither "json" nor a JSON schema'),
        ({"think": "hard"}, "think is 'hard'; expected true or false or 'low', 'medium'"),
        ({"messages": [{"role": "wizard"}]}, "messages.0.role is 'wizard'"),
    ],
)
def test_what_would_change_the_answer_is_followed_or_refused(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert words in str(caught.value)


@pytest.mark.parametrize("field", ["suffix", "context"])
def test_what_generate_cannot_follow_is_refused(field: str) -> None:
    with pytest.raises(ApiError, match=f"{field} is not supported"):
        generate(**{field: [1] if field == "context" else "x"})


def test_thoughts_text_and_whole_calls_are_lines_of_their_own() -> None:
    parts = [
        AnswerPart(reasoning="hm"), AnswerPart(content="I look"),
        AnswerPart(call=Call("f", '{"n"')), AnswerPart(arguments=": 1}"),
    ]  # fmt: skip
    reader: Any = Scripted(parts)
    request = GenerationRequest(request=Request(prompt=(1,) * 10), prompt_text="", reader=reader)
    times = iter(range(100))
    reply = OllamaReply(request, "tiny", is_chat=True, clock=lambda: float(next(times)))
    reply.arrive(Surroundings(str, lambda *kept: None))
    events: list[dict[str, Any]] = [
        dict(event)
        for number in range(1, 5)
        for event in reply.take(0, token(number, "stop" if number == 4 else None))
    ]
    thought, text, call, end = events
    assert thought["message"] == {"role": "assistant", "content": "", "thinking": "hm"}
    assert text["message"]["content"] == "I look"
    (one,) = call["message"]["tool_calls"]
    assert (one["function"]["name"], one["function"]["arguments"]) == ("f", {"n": 1})
    assert [event["done"] for event in events] == [False, False, False, True]
    assert (end["done_reason"], end["prompt_eval_count"], end["eval_count"]) == ("stop", 10, 4)
    assert end["total_duration"] == end["prompt_eval_duration"] + end["eval_duration"] > 0
    whole: dict[str, Any] = reply.whole()
    message = whole["message"]
    assert (message["thinking"], message["content"]) == ("hm", "I look")
    assert message["tool_calls"] == [one]


def test_log_probabilities_come_with_the_text_that_follows() -> None:
    request = GenerationRequest(request=Request(prompt=(1,)), prompt_text="")
    reply = pickle.loads(pickle.dumps(OllamaReply(request, "tiny", is_chat=False)))
    reply.arrive(Surroundings(str, lambda *kept: None))
    one = token(1, "length")
    logprob = TokenLogprob(token_id=5, logprob=-0.5, top=((5, -0.5),))
    text, end = reply.take(0, one._replace(logprob=logprob))
    assert text["response"] == "x"
    entry = {"token": "5", "logprob": -0.5, "bytes": [53]}
    assert text["logprobs"] == reply.whole()["logprobs"] == [{**entry, "top_logprobs": [entry]}]
    assert "logprobs" not in end
    assert end["done_reason"] == "length"


def test_streams_and_whole_answers_say_the_same(server: RunningServer) -> None:
    whole = server.post("/api/chat", messages=HELLO, options=FEW, stream=False).ok
    *parts, end = lines(server.post("/api/chat", model="tiny", messages=HELLO, options=FEW))
    text = "".join(part["message"]["content"] for part in parts)
    assert text == whole["message"]["content"] == server.chat(max_tokens=5, temperature=0).text
    assert (end["done_reason"], end["eval_count"]) == ("length", 5)
    raw = server.post("/api/generate", prompt="abc", raw=True, options=FEW, stream=False).ok
    assert raw["response"] == server.complete(max_tokens=5).ok["choices"][0]["text"]
    text = server.post("/api/generate", prompt="hello", options=FEW, stream=False).ok["response"]
    assert text == whole["message"]["content"]


def test_a_form_rules_the_answer(server: RunningServer) -> None:
    reply = server.post("/api/generate", prompt="x", format=SCHEMA, stream=False)
    assert json.loads(reply.ok["response"])["count"] in (1, 22)


def test_the_model_is_listed_shown_and_loaded(server: RunningServer) -> None:
    (model,) = server.ask("GET", "/api/tags").ok["models"]
    (running,) = server.ask("GET", "/api/ps").ok["models"]
    assert model["name"] == running["name"] == "tiny"
    assert running["context_length"] == 32768
    shown = server.post("/api/show", name="tiny:latest").ok
    kind = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{kind}.context_length"] == 32768
    assert shown["capabilities"] == ["completion", "tools"]
    major, minor, _ = server.ask("GET", "/api/version").ok["version"].split(".")
    assert (int(major), int(minor)) >= (0, 6)  # editors request this much
    loaded = server.post("/api/generate", model="tiny", keep_alive=300).ok
    assert (loaded["done_reason"], loaded["response"]) == ("load", "")
    assert server.post("/api/chat", messages=[], keep_alive=0).ok["done_reason"] == "unload"


def test_errors_are_a_sentence(server: RunningServer) -> None:
    for path, body, status, words in (
        ("/api/chat", b"{", 400, "the body is not JSON"),
        ("/api/chat", b'{"messages": 5}', 400, "messages is 5; expected a list"),
        ("/api/chat", json.dumps({"messages": HELLO, "think": True}).encode(), 400,
         '"tiny" does not support thinking'),
        ("/api/generate", b'{"prompt": "x", "images": ["QUJD"]}', 400, "reads text only"),
        ("/api/embed", b'{"input": "x"}', 404, "no embeddings"),
        ("/api/pull", b'{"model": "x"}', 404, "start another with tandem serve"),
        ("/api/nothing", b"{}", 404, "Not Found"),
    ):  # fmt: skip
        reply = server.ask("POST", path, body)
        assert reply.status == status, reply.body
        assert set(reply.json) == {"error"}
        assert words in reply.json["error"]


def test_json_without_a_content_type_is_read_unless_a_page_sends_it(server: RunningServer) -> None:
    body = json.dumps({"messages": HELLO, "options": FEW, "stream": False}).encode()
    for kind in ("", "application/x-www-form-urlencoded"):
        headers = {"Content-Type": kind}
        assert server.ask("POST", "/api/chat", body, headers).status == 200
        for name in ("Origin", "Referer", "Sec-Fetch-Site"):
            page = server.ask("POST", "/api/chat", body, {**headers, name: "null"})
            assert page.status == 415
            assert "error" in page.json

"""Tests of conversations that do not fit: refused, or trimmed and reported."""

import json
import logging
from typing import Any

import pytest

from tandem.apis.answering import GenerationRequest, GenerationRequests
from tandem.apis.reading import read_body
from tandem.apis.replies import ChatReply
from tandem.apis.schemas import ChatRequest, CompletionRequest
from tandem.engine.messages import ModelInfo
from tandem.generate.thinking import ThinkingLimit
from tandem.server.service import trimming_headers
from tandem.text.text_tokens import TextTooLongError

LIMIT = 400
INFO = ModelInfo(
    model_type="tiny", vocabulary=128, end_ids=(), context=LIMIT, max_running=1, num_layers=1,
    num_experts=4, device="cpu", why_padded=None, why_no_images=None,
)  # fmt: skip
SYSTEM = {"role": "system", "content": "be short"}
LONG = [
    {"role": role, "content": f"{role} {turn} " + "x" * 40}
    for turn in range(9)
    for role in ("user", "assistant")
] + [{"role": "user", "content": "the last"}]


def chat_request(messages: list[dict[str, str]], **fields: Any) -> ChatRequest:
    raw = json.dumps({"messages": messages, **fields}).encode()
    return read_body(ChatRequest, raw, is_strict=True).body


def trimmed(tokenizer: Any, messages: list[dict[str, str]], **fields: Any) -> GenerationRequest:
    generation_requests = GenerationRequests(tokenizer, context=None, trims=True)
    (generation_request,) = generation_requests.chat(chat_request(messages, **fields), INFO)
    return generation_request


def test_a_budget_of_reasoning_is_handed_on_where_the_model_reasons(tokenizer: Any) -> None:
    plain = tokenizer.chat_template
    limits = []
    for template in (plain, plain + "<think>\n"):
        tokenizer.chat_template = template
        generation_request = trimmed(tokenizer, [LONG[-1]], thinking_token_budget=7)
        limits.append(generation_request.request.thinking)
    assert limits == [
        None,
        ThinkingLimit(num_tokens=7, begin="<think>", end="</think>", closing="\n</think>\n\n",
                      has_begun=True),
    ]  # fmt: skip


def test_whole_turns_are_dropped_from_the_front_and_the_system_message_stays(
    tokenizer: Any,
) -> None:
    generation_request = trimmed(tokenizer, [SYSTEM, *LONG], max_tokens=50)
    assert 0 < generation_request.num_dropped_turns < 9
    assert generation_request.prompt_tokens + 50 <= LIMIT
    assert "be short" in generation_request.prompt_text
    assert "the last" in generation_request.prompt_text
    first = generation_request.num_dropped_turns
    assert f"user {first} " in generation_request.prompt_text
    assert f"assistant {first - 1} " not in generation_request.prompt_text
    more = trimmed(tokenizer, [SYSTEM, *LONG[2 * first - 2 :]], max_tokens=50)
    assert more.num_dropped_turns == 1, "no more is dropped than must be"


def test_what_fits_is_left_alone(tokenizer: Any) -> None:
    generation_request = trimmed(tokenizer, [SYSTEM, *LONG[-3:]])
    assert generation_request.num_dropped_turns == 0
    assert trimming_headers(0) == {}


def test_without_it_a_conversation_is_refused_and_so_is_a_last_turn_that_is_too_long(
    tokenizer: Any,
) -> None:
    with pytest.raises(TextTooLongError, match="the prompt is too long"):
        GenerationRequests(tokenizer, context=None).chat(chat_request([SYSTEM, *LONG]), INFO)
    with pytest.raises(TextTooLongError, match="the prompt is too long"):
        trimmed(tokenizer, [*LONG, {"role": "user", "content": "x" * 500}])


def test_transformers_says_nothing_of_its_own_about_a_long_prompt(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    logger = logging.getLogger("transformers.tokenization_utils_base")
    monkeypatch.setattr(logger, "warning", lambda text, *_: logged.append(text))
    monkeypatch.setattr(tokenizer, "model_max_length", 9)
    generation_requests = GenerationRequests(tokenizer, context=None)
    generation_requests.chat(chat_request([SYSTEM]), INFO)
    raw = json.dumps({"prompt": "x" * 20}).encode()
    generation_requests.completions(read_body(CompletionRequest, raw, is_strict=True).body, INFO)
    assert logged == []
    tokenizer("x" * 20)
    assert len(logged) == 1, "without care it does"


def test_the_answer_and_the_log_say_what_was_dropped(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    generation_request = trimmed(tokenizer, [SYSTEM, *LONG])
    number = generation_request.num_dropped_turns
    with caplog.at_level(logging.INFO, "tandem.server"):
        assert trimming_headers(number) == {"X-Tandem-Dropped-Turns": str(number)}
    assert f"{number} of its oldest turns were dropped" in caplog.text
    reply = ChatReply(chat_request(LONG), [generation_request], "tiny")
    assert reply.whole()["dropped_turns"] == number
    assert reply.first_events()[0]["dropped_turns"] == number

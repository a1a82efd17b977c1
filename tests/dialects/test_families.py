"""Tests that answers in a published template's form are parsed, however they are split."""

import json
import pickle
from collections.abc import Iterable
from typing import Any

import pytest

from tandem.dialects.coming_call import AnswerPart, Call
from tandem.dialects.families import FAMILIES, dialect_of
from tandem.dialects.format import ChatFormat, ChatPrompt
from tests.dialects.published import PUBLISHED, QUESTION, TEMPLATES, TOOLS, Published
from tests.hf.tiny import byte_tokenizer

REASONING, CONTENT = "I look it up\n in two steps: {1}.", "Let me see, <i>now</i>."
IDS = [one.file for one in PUBLISHED]


def joined_calls(parts: list[AnswerPart]) -> list[Call]:
    """Return an answer's calls, whose arguments may be split."""
    calls: list[Call] = []
    for part in parts:
        if part.call is not None:
            calls.append(part.call)
        elif part.arguments:
            calls[-1] = Call(calls[-1].name, calls[-1].arguments + part.arguments)
    return calls


def form(template: str) -> ChatFormat:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return ChatFormat(tokenizer)


def published(file: str) -> ChatFormat:
    return form((TEMPLATES / f"{file}.jinja").read_text(encoding="utf-8"))


def written(case: Published) -> tuple[ChatFormat, ChatPrompt, str]:
    """Return a template's format, a prompt, and an answer as the template writes it."""
    chat = published(case.file)
    calls = [("look_up", case.arguments), ("now", {})][: case.num_calls]
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": CONTENT if case.has_content else "",
        "tool_calls": [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": given}}
            for i, (name, given) in enumerate(calls)
        ],
    }
    if case.has_reasoning:
        answer["reasoning_content"] = REASONING
    prompt = chat.prompt([QUESTION], TOOLS, case.options)
    options = {**case.options, "add_generation_prompt": False}
    whole = chat.prompt([QUESTION, answer], TOOLS, options).text
    beginning = prompt.text.rstrip()
    assert whole.startswith(beginning), (whole, beginning)
    return chat, prompt, whole[len(beginning) :].partition(case.end)[0]


def read(
    chat: ChatFormat, prompt: ChatPrompt, pieces: Iterable[str], tools: Any = TOOLS
) -> tuple[str, str, list[Call]]:
    """Return the reasoning, text and calls of an answer that is split into pieces."""
    reader = pickle.loads(pickle.dumps(chat.reader(prompt, tools)))  # as it reaches the server
    assert reader is not None
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.finish()
    calls = joined_calls(parts)
    return "".join(p.reasoning for p in parts), "".join(p.content for p in parts), calls


@pytest.mark.parametrize("case", PUBLISHED, ids=IDS)
def test_what_a_template_writes_is_read_back_however_it_is_cut(case: Published) -> None:
    chat, prompt, answer = written(case)
    assert chat.dialect.name == case.family
    whole = read(chat, prompt, [answer])
    reasoning, content, calls = whole
    assert reasoning.strip() == (REASONING if case.has_reasoning else "")
    assert content.strip() == (CONTENT if case.has_content else "")
    assert [call.name for call in calls] == ["look_up", "now"][: case.num_calls]
    assert json.loads(calls[0].arguments) == case.arguments
    assert read(chat, prompt, list(answer)) == whole
    for cut in range(1, len(answer)):
        found = read(chat, prompt, [answer[:cut], answer[cut:]])
        assert found == whole, answer[:cut]


def test_every_family_is_tried() -> None:
    """Two templates have no calls, or not as their models write them; see below."""
    untried = {one.name for one in FAMILIES} - {one.family for one in PUBLISHED}
    assert untried == {"granite", "nemotron"}
    assert dialect_of("no calls at all").name == "hermes"


@pytest.mark.parametrize("case", PUBLISHED, ids=IDS)
def test_plain_text_stays_as_it_is(case: Published) -> None:
    chat, prompt, _ = written(case)
    think = chat.dialect.end_think if prompt.is_thinking else ""
    text = 'f(x) = [1, 2] <b>x</b>\n\n  {"a": 1} and so on. '
    for pieces in ([text], list(text)):
        assert read(chat, prompt, [think, *pieces])[1:] == (text, [])


@pytest.mark.parametrize(
    ("file", "answer", "calls"),
    [
        (
            "ibm-granite-granite-3.3-2B-Instruct",
            '<|tool_call|>[{"name": "look_up", "arguments": {"count": 5}}, {"name": "now"}]',
            [Call("look_up", '{"count": 5}'), Call("now", "{}")],
        ),
        (
            "NVIDIA-Nemotron-Nano-v2",
            '</think><TOOLCALL>[{"name": "look_up", "arguments": {"count": 5}}]</TOOLCALL>',
            [Call("look_up", '{"count": 5}')],
        ),
        (
            "openai-gpt-oss-120b",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.look_up <|constrain|>json<|message|>{"count": 5}<|call|>',
            [Call("look_up", '{"count": 5}')],
        ),
        (
            "deepseek-ai-DeepSeek-V3.1",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n"
            '{"count": 5}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            [Call("look_up", '{"count": 5}')],
        ),
        (
            "Qwen3-Coder",
            "<function=look_up>\n<parameter=count>\n5\n</parameter>\n</function>\n</tool_call>",
            [Call("look_up", '{"count": 5}')],
        ),
        (
            "LFM2.5-8B-A1B",
            "<|tool_call_start|>[look_up(deep=true, where={'x': None}, text=\"a'b\")]"
            "<|tool_call_end|>",
            [Call("look_up", '{"deep": true, "where": {"x": null}, "text": "a\'b"}')],
        ),
    ],
)
def test_documented_forms_that_no_template_writes_are_read_too(
    file: str, answer: str, calls: list[Call]
) -> None:
    chat = published(file)
    prompt = chat.prompt([QUESTION], TOOLS, {})
    for pieces in ([answer], list(answer)):
        assert read(chat, prompt, pieces)[1:] == ("", calls)


@pytest.mark.parametrize(
    ("file", "answer"),
    [
        ("Qwen-Qwen3-0.6B", "<tool_call>{oops</tool_call>"),
        ("LFM2.5-8B-A1B", "<|tool_call_start|>[open('x').read()]<|tool_call_end|>"),
        ("Mistral-Small-3.2-24B-Instruct-2506", "[TOOL_CALLS]look_up[ARGS]{oops"),
        ("mistralai-Mistral-Nemo-Instruct-2407", '[TOOL_CALLS][{"no": "name"}]'),
    ],
)
def test_a_call_that_is_none_stays_text(file: str, answer: str) -> None:
    chat = published(file)
    prompt = chat.prompt([QUESTION], TOOLS, {"enable_thinking": False})
    for pieces in ([answer], list(answer)):
        _, content, calls = read(chat, prompt, pieces)
        assert calls == []
        assert content

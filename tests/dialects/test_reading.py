"""Tests of parsing a model's output into reasoning, text and calls, however it is split."""

import pickle

import pytest

from tandem.dialects.arguments import by_schema
from tandem.dialects.coming_call import Call
from tandem.dialects.format import ChatFormat, TemplateError
from tests.dialects.test_families import form, read

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
THINKING = PLAIN + "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
TOOLS = THINKING + "{# a template that knows tools #}"
QUESTION = [{"role": "user", "content": "why?"}]
LOOK = [{"function": {"name": "look", "parameters": {"type": "object"}}}]
CALLED = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("types", "text", "expected"),
    [
        (["string", "number"], "5", 5), (["string", "number"], "5.5", 5.5),
        (["string", "integer"], "5.5", "5.5"), (["string", "integer"], "5", 5),
        (["string"], "5", "5"), (["number"], "5", 5),
    ],
)  # fmt: skip
def test_a_whole_number_is_a_number(types: list[str], text: str, expected: object) -> None:
    found = by_schema(text, {"type": types})
    assert (found, type(found)) == (expected, type(expected))


def cut(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for m in %}", "Expected an expression"),
        ("{{ messages[7].content }}", "has no element 7"),
        ("{{ raise_exception(messages[0].content) }}", "why?"),
    ],
)
def test_a_broken_template_is_one_sentence_and_the_log_repeats_no_prompt(
    template: str, words: str
) -> None:
    with pytest.raises(TemplateError, match="chat template cannot write this") as caught:
        form(template).prompt(QUESTION, (), {})
    assert words in str(caught.value)
    assert "why" not in caught.value.reason


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_that_the_template_opens_is_split_off(size: int) -> None:
    chat = form(THINKING)
    prompt = chat.prompt(QUESTION, (), {})
    assert prompt.is_thinking
    found = read(chat, prompt, cut("it scatters\n</think>\n\nBlue <b>", size), [])
    assert (found[0].strip(), found[1], found[2]) == ("it scatters", "Blue <b>", [])


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_that_the_model_opens_is_split_off(size: int) -> None:
    chat = form(THINKING)
    prompt = chat.prompt(QUESTION, (), {"enable_thinking": False})
    assert not prompt.is_thinking
    found = read(chat, prompt, cut("<think>hm</think>Blue", size), [])
    assert found == ("hm", "Blue", [])
    assert read(chat, prompt, cut("Blue", size), []) == ("", "Blue", [])


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_come_after_reasoning_and_text(size: int) -> None:
    chat = form(TOOLS)
    prompt = chat.prompt(QUESTION, (), {})
    text = f"I look</think>Wait. {CALLED}{CALLED}"
    reasoning, content, calls = read(chat, prompt, cut(text, size), LOOK)
    assert (reasoning, content.strip()) == ("I look", "Wait.")
    assert calls == [Call("look", '{"at": "sky"}')] * 2


def streamed(chat: ChatFormat, text: str) -> list[str]:
    """Return the pieces of a call's arguments if the characters arrive one by one."""
    reader = pickle.loads(pickle.dumps(chat.reader(chat.prompt(QUESTION, (), {}), LOOK)))
    assert reader is not None
    parts = [part for one in text for part in reader.feed(one)] + reader.finish()
    return [part.call.arguments if part.call else part.arguments for part in parts]


def test_arguments_come_while_they_are_written() -> None:
    text = '{"at": "a \\"}{ sky", "n": [1, {"x": 2}]}'
    pieces = streamed(
        form(PLAIN), f'<tool_call>\n{{"name": "look", "arguments": {text}}}</tool_call>'
    )
    assert "".join(pieces) == text
    assert len(pieces) > 20


def test_a_call_of_no_known_tool_comes_whole() -> None:
    text = '<tool_call>{"name": "other", "arguments": {"at": "sky"}}</tool_call>'
    assert streamed(form(PLAIN), text) == ['{"at": "sky"}']


def test_tagged_arguments_come_one_by_one() -> None:
    chat = form(PLAIN + "{# <function= <parameter= #}")
    text = (
        "<tool_call>\n<function=look>\n<parameter=at>\nsky\n</parameter>\n<parameter=n>\n5\n"
        "</parameter>\n</function>\n</tool_call>"
    )
    assert streamed(chat, text) == ['{"at": "sky"', ', "n": 5', "}"]


def test_a_call_that_breaks_off_stays_a_call() -> None:
    text = '<tool_call>{"name": "look", "arguments": {"at": "sk'
    assert "".join(streamed(form(PLAIN), text)) == '{"at": "sk'


def test_a_call_that_is_no_json_stays_text() -> None:
    chat = form(PLAIN)
    prompt = chat.prompt(QUESTION, (), {})
    found = read(chat, prompt, cut("a <tool_call>{oops</tool_call> b", 4), LOOK)
    assert found[2] == []
    assert "oops" in found[1]


def test_an_answer_whose_first_word_is_ruled_does_not_think() -> None:
    always = PLAIN + "<think>\n"
    prompt = form(always).prompt(QUESTION, (), {}, must_not_think=True)
    assert prompt.text.endswith("</think>\n\n")
    assert not prompt.is_thinking


def test_without_marks_all_is_text() -> None:
    chat = form(PLAIN)
    assert chat.reader(chat.prompt(QUESTION, (), {}), []) is None

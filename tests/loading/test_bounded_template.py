"""Tests of chat templates that never end or use all memory: one-sentence errors."""

import threading
from typing import Any

import pytest

from tandem.core.errors import ConfigError
from tandem.dialects.format import ChatFormat, TemplateError
from tandem.generate.prompt import encode_conversation
from tandem.text import bounded_template
from tandem.text.bounded_template import TemplateEndedError, bounded
from tests.hf.tiny import byte_tokenizer

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
LOOPS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% set c = a * b %}{% endfor %}{% endfor %}"
)
DOUBLES = (
    "{% set n = namespace(t='x' * 1000000) %}"
    "{% for a in range(99999) %}{% set n.t = n.t ~ 'x' * 1000000 %}{% endfor %}"
)


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_template, "CPU_SECONDS", 0.2)
    monkeypatch.setattr(bounded_template, "MOST_BYTES", 256 << 20)


@pytest.mark.parametrize("template", [LOOPS, DOUBLES], ids=["loops", "doubles"])
def test_a_template_without_end_is_ended(template: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(TemplateError, match="and was ended"):
        ChatFormat(tokenizer).prompt(MESSAGES, [], {})
    with pytest.raises(ConfigError, match="and was ended"):
        encode_conversation(tokenizer, MESSAGES)
    assert not [one for one in threading.enumerate() if one.name == "tandem-template"]


def test_a_template_with_calls_is_not_tried_again() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% if tools is undefined %}" + LOOPS + "{% endif %}" + LOOPS
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}, "id": "x"}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    with pytest.raises(TemplateError, match="and was ended"):
        ChatFormat(tokenizer).prompt([*MESSAGES, turn], [], {})


def test_what_ends_is_returned_and_what_fails_is_raised() -> None:
    assert bounded(lambda: "text") == "text"
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: str(1 // 0))


def test_time_that_others_take_is_not_counted() -> None:
    """The time limit counts processor time, so waiting for the processor is free."""
    event = threading.Event()
    assert bounded(lambda: event.wait(0.6)) is False
    with pytest.raises(TemplateEndedError):
        bounded(lambda: sum(number for number in iter(int, 1)))

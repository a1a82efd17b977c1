"""Tests of conversations: failed turns are dropped, and a full context loses whole turns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.cli.chat import chat
from tandem.cli.session import Session, SessionOptions
from tandem.core.errors import ConfigError
from tandem.generate.sampling import SamplingOptions
from tests.hf.tiny import byte_tokenizer

CONTEXT_TOKENS = 256  # of the tiny model, whose tokenizer has one token per byte

Opener = Callable[..., Session]


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return tandem.load(checkpoint)


@pytest.fixture
def opened(model: Any) -> Opener:
    """Open a session whose answers have three tokens."""

    def open_session(template: str | None = None, **options: Any) -> Session:
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template or tokenizer.chat_template
        sampling = SamplingOptions(max_new_tokens=3, temperature=0)
        return Session(model, tokenizer, SessionOptions(**options), sampling)

    return open_session


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Replace the user's input by these lines."""
    waiting = iter([*lines, "/exit"])
    monkeypatch.setattr("builtins.input", lambda *_: next(waiting))


def roles(session: Session) -> str:
    return "".join(message["role"][0] for message in session._messages)


def test_a_turn_that_fails_is_taken_back(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = opened(context_full="stop")
    typed(monkeypatch, "hello", "x" * CONTEXT_TOKENS, "again", "bytes \udcff")
    assert chat(session) == 0
    assert roles(session) == "uaua"
    errors = capsys.readouterr().err
    assert errors.count("first token") == 2
    assert "--context-full trim drops its oldest turns" in errors
    assert "the prompt holds the byte 0xff after 6 characters" in errors


@pytest.mark.parametrize("quiet", [False, True])
def test_a_full_conversation_loses_its_oldest_turns_and_says_so(
    opened: Opener, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    session = opened(system="short", quiet=quiet)
    for turn in range(12):
        session.ask(f"message {turn:02} {'.' * 20}")
    errors = capsys.readouterr().err
    assert "[the conversation fills the model's context of 256 tokens: its oldest " in errors
    assert "turns are dropped]" in errors
    assert 0 < errors.count("dropped") < 6  # not at every turn: each costs a prefill
    assert roles(session).startswith("sua")
    assert "message 11" in session._messages[-2]["content"]


def test_stop_keeps_the_conversation_as_it_is(opened: Opener) -> None:
    session = opened(context_full="stop")
    session.ask("x" * 100)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"the model's context is 256; /clear forgets"):
            session.ask("y" * 200)
    assert roles(session) == "ua"
    session.ask("z")
    assert roles(session) == "uaua"


def test_a_message_that_is_too_long_drops_nothing(
    opened: Opener, capsys: pytest.CaptureFixture[str]
) -> None:
    session = opened()
    session.ask("hello")
    with pytest.raises(ConfigError, match="shorten the prompt"):
        session.ask("x" * CONTEXT_TOKENS)
    assert roles(session) == "ua"
    assert "dropped" not in capsys.readouterr().err


@pytest.mark.seam
@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('only users here') }}", "only users here"),
        ("{% for m in messages %}{{ m.role", "unexpected end of template"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ 1 // 0 }}", "by zero"),
    ],
)
def test_a_broken_template_is_one_sentence(opened: Opener, template: str, why: str) -> None:
    session = opened(template)
    with pytest.raises(ConfigError, match="the model's chat template cannot write this") as error:
        session.ask("hello")
    assert why in str(error.value)
    assert "\n" not in str(error.value)


def test_a_failed_turn_is_json_for_scripts(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "x" * CONTEXT_TOKENS)
    chat(opened(json=True))
    assert '{"error": {"type": "ConfigError", "message": "the prompt has' in capsys.readouterr().out

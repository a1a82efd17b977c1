"""Tests of a chat's commands, its messages of several lines, and its saved history."""

import json
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.cli.chat import COMMANDS, chat
from tandem.cli.session import Session, SessionOptions
from tandem.generate.prompt import encode_conversation
from tandem.generate.sampling import SamplingOptions
from tests.cli.terminal import Terminal
from tests.hf.tiny import byte_tokenizer
from tests.programs import ENVIRONMENT
from tests.programs import tandem as run_tandem

Talk = Callable[..., Session]


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return tandem.load(checkpoint)


@pytest.fixture
def talk(model: Any, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Chat with these input lines until the end of input; answers have three tokens."""

    def chat_with(*lines: str, sampling: dict[str, Any] | None = None, **options: Any) -> Session:
        waiting = iter(lines)

        def type_next(*_: object) -> str:
            try:
                return next(waiting)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", type_next)
        chosen = SamplingOptions(**{"max_new_tokens": 3, "temperature": 0, **(sampling or {})})
        session = Session(model, byte_tokenizer(), SessionOptions(**options), chosen)
        assert chat(session) == 0
        return session

    return chat_with


def user_messages(session: Session) -> list[str]:
    return [str(m["content"]) for m in session.messages if m["role"] == "user"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['"""one', "two", 'three"""'], "one\ntwo\nthree"),
        (['"""', "one", "", "two", '"""'], "one\n\ntwo"),
        (['"""one line"""'], "one line"),
        (['"""/exit', '"""'], "/exit"),
        (['"""never closed', "two"], "never closed\ntwo"),
    ],
)
def test_triple_quotes_hold_a_message_of_several_lines(
    talk: Talk, lines: list[str], message: str
) -> None:
    assert user_messages(talk(*lines)) == [message]


@pytest.mark.parametrize("lines", [['"""', '"""'], ['""""""'], [""], ["  "]])
def test_an_empty_message_is_no_turn(talk: Talk, lines: list[str]) -> None:
    assert talk(*lines).messages == []


def test_a_slash_and_more_words_is_a_message(talk: Talk) -> None:
    assert user_messages(talk("/exit\nis pasted")) == ["/exit\nis pasted"]
    assert user_messages(talk("/etc/hosts is what?")) == ["/etc/hosts is what?"]


def test_help_lists_every_command(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    talk("/help")
    shown = capsys.readouterr().err
    assert [name for name in [*COMMANDS, '"""'] if f"{name} " not in shown] == []


def test_a_mistyped_command_gets_the_nearest(
    talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk("/regenrate").messages == []
    assert "unknown command /regenrate; did you mean '/regenerate'?" in capsys.readouterr().err


def test_set_changes_the_next_answers(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    session = talk("one", "/set max_new_tokens 5", "/set max-new-tokens 6", "two", "/set seed 7")
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * 2
    first, second = (m["content"] for m in session.messages if m["role"] == "assistant")
    assert (len(first), len(second)) == (3, 6)
    assert session.sampling.seed == 7
    shown = capsys.readouterr().err
    assert "max_new_tokens = 5\n" in shown
    assert "max_new_tokens = 6\n" in shown


def test_set_alone_shows_all_and_default_takes_back(
    talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    session = talk("/set top_p 0.5", "/set temperature 1.5", "/set temperature default", "/set")
    assert session.sampling.temperature == 0
    *_, last = capsys.readouterr().err.split("> ")[:-1]
    assert "temperature = 0\n" in last
    assert "top_p = 0.5\n" in last
    assert "seed = the model's own\n" in last
    assert "system = none\n" in last


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/set temprature 1", "/set knows no 'temprature'; did you mean 'temperature'?"),
        ("/set temperature hot", "temperature is 'hot'; expected a number, or default"),
        ("/set temperature -1", "temperature is -1.0; expected a number >= 0"),
        ("/set seed 1.5", "seed is '1.5'; expected a whole number, or default"),
        ("/set top_p 2", "top_p is 2.0; expected a number in"),
        ("/set max_new_tokens 0", "max_new_tokens is 0; expected"),
        ("/set system \udcff", "holds the byte 0xff"),
        ("/regenerate", "there is no answer yet"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_changes_nothing(
    talk: Talk, capsys: pytest.CaptureFixture[str], line: str, sentence: str
) -> None:
    session = talk(line)
    assert session.sampling == SamplingOptions(max_new_tokens=3, temperature=0)
    assert session.messages == []
    assert f"error: {sentence}" in capsys.readouterr().err.replace("--system ", "")


def test_the_system_message_changes_and_the_conversation_stays(talk: Talk) -> None:
    session = talk("one", "/set system be short", "two", system="be long")
    roles = [message["role"] for message in session.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert session.messages[0]["content"] == "be short"
    assert talk("/set system default", system="be long").messages[0]["content"] == "be long"


def test_regenerate_answers_the_last_message_once_more(
    talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    once = talk("one", "two")
    again = talk("one", "two", "/regenerate", "/regenerate")
    assert again.messages == once.messages  # the best tokens are the same
    assert (
        "[the answer will be the same: the most likely token is always chosen"
        in capsys.readouterr().err
    )
    other = talk("one", "/set temperature 5", "/set seed 1", "/regenerate")
    assert user_messages(other) == ["one"]
    assert other.messages[1] != once.messages[1]
    assert "[the answer will be the same: the seed is fixed" in capsys.readouterr().err


def test_a_turn_says_what_its_rate_counts_and_how_full_the_context_is(
    talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    session = talk("one", "two")
    first, second = (line for line in capsys.readouterr().err.splitlines() if "prefill" in line)
    prompt = len("user: one\nassistant:")
    assert f"tok/s ({prompt} tokens)" in first
    assert f"| context {(prompt + 3) / 256:.0%} of 256 tokens" in first
    new, kept = map(int, re.findall(r"(\d+) (?:new|kept)", second))
    assert kept >= prompt
    assert new + kept == len(encode_conversation(byte_tokenizer(), session.messages[:-1]))


def test_a_chat_is_saved_and_gone_on_with(
    talk: Talk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chat.json"
    saved = talk("one", f"/save {file}", "two", f"/save {file}", system="be short")
    assert "[5 messages are written to " in capsys.readouterr().err
    loaded = talk("three", f"/load {file}", "four")
    assert loaded.messages[:5] == saved.messages
    assert user_messages(loaded) == ["one", "two", "four"]
    assert loaded.options.system == "be short"
    assert "[5 messages are read from " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/save", "/save needs the name of a file: /save chat.json"),
        ("/load {}/nothing", "nothing: No such file or directory"),
        ("/load {}/notes", "notes is not a chat; expected"),
        ("/load {}/other", "other is not a chat; expected"),
        ("/save {}/notes", "notes is not a chat; expected"),
        ("/save {}", "Is a directory"),
    ],
)
def test_files_of_chats_that_cannot_be_are_one_sentence(
    talk: Talk, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, sentence: str
) -> None:
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "other").write_text('{"messages": [{"role": "tool", "content": "x"}]}')
    session = talk("one", line.format(tmp_path))
    assert user_messages(session) == ["one"]
    shown = capsys.readouterr().err
    assert "error: " in shown
    assert sentence in shown
    assert (tmp_path / "notes").read_text() == "mine"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["notes", "other"]


def test_clear_says_what_it_has_forgotten(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(talk("one", "two", "/clear", system="be short").messages) == 1
    assert "[4 messages are forgotten]" in capsys.readouterr().err


def test_a_failed_regeneration_keeps_the_answer(model: Any, talk: Talk) -> None:
    session = talk("one")
    kept = list(session.messages)
    session._tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(tandem.TandemError, match="chat template"):
        session.regenerate()
    assert session.messages == kept


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def on_a_terminal(checkpoint: Path, cache: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_terminal(*words: str) -> Terminal:
        flags = ("--seed", "1", "--max-new-tokens", "3", *words)
        env = {**ENVIRONMENT, "TANDEM_CACHE": str(cache)}
        opened.append(Terminal(["chat", str(checkpoint), *flags], env))
        opened[-1].wait_for("> ")
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.__exit__()


def leave(terminal: Terminal) -> None:
    terminal.type("/exit\r")
    assert terminal.close() == 0


def test_what_is_typed_comes_back_in_the_next_chat(
    on_a_terminal: Callable[..., Terminal], cache: Path
) -> None:
    first = on_a_terminal()
    position = first.type("what was I asking\r")
    first.wait_for("decode", after=position)
    leave(first)
    file = cache / "chat-history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text().splitlines() == ["what was I asking", "/exit"]
    second = on_a_terminal()
    position = second.type("\x10\x10")  # Ctrl-P, twice: the line before the last
    second.wait_for("what was I asking", after=position)
    second.type("\x15")  # Ctrl-U: drop it
    leave(second)


def test_a_message_of_several_lines_is_typed_and_dropped_by_control_c(
    on_a_terminal: Callable[..., Terminal],
) -> None:
    terminal = on_a_terminal()
    position = terminal.type('"""one\r')
    terminal.wait_for(". ", after=position + len('"""one'))
    terminal.press_until("\x03", "/help shows all commands", after=position)
    position = terminal.type('"""one\rtwo"""\r')
    terminal.wait_for("decode", after=position)
    leave(terminal)


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_pasted_lines_are_one_message_and_come_back_as_one(
    on_a_terminal: Callable[..., Terminal], cache: Path, tmp_path: Path, ends: str
) -> None:
    lines = ["/exit", "def f():", "    return 1", "", "what is this?"]
    first = on_a_terminal()
    position = first.type(f"\x1b[200~{ends.join(lines)}\x1b[201~\r")
    first.wait_for("decode", after=position)
    position = first.type("one\x1b\rtwo\r")  # Alt-Enter begins a new line
    first.wait_for("decode", after=position)
    position = first.type(f"/save {tmp_path / 'chat.json'}\r")
    first.wait_for("4 messages are written to", after=position)
    leave(first)
    pasted = [line.split() for line in user_messages_in(tmp_path / "chat.json")[0].splitlines()]
    assert [line for line in pasted if line] == [line.split() for line in lines if line]
    assert user_messages_in(tmp_path / "chat.json")[1] == "one\ntwo"
    second = on_a_terminal()
    second.type("\x10" * 3 + "\x01")  # Ctrl-P to the message before /save, Ctrl-A to its begin
    position = second.type("X\r")
    second.wait_for("decode", after=position)
    second.type(f"/save {tmp_path / 'again.json'}\r")
    leave(second)
    assert user_messages_in(tmp_path / "again.json") == ["Xone\ntwo"]


def user_messages_in(file: Path) -> list[str]:
    messages = json.loads(file.read_text())["messages"]
    return [message["content"] for message in messages if message["role"] == "user"]


def test_no_history_leaves_no_file(on_a_terminal: Callable[..., Terminal], cache: Path) -> None:
    leave(on_a_terminal("--no-history"))
    assert not (cache / "chat-history").exists()


def test_a_history_that_cannot_be_kept_is_reported_and_no_error(
    on_a_terminal: Callable[..., Terminal], cache: Path
) -> None:
    (cache / "chat-history").mkdir(parents=True)
    terminal = on_a_terminal()
    assert "[what is typed is not kept: " in terminal.screen
    leave(terminal)


def test_each_line_of_a_pipe_is_a_message(checkpoint: Path, cache: Path) -> None:
    env = {**ENVIRONMENT, "TANDEM_CACHE": str(cache)}
    words = ("chat", str(checkpoint), "--max-new-tokens", "3", "--temperature", "0")
    done = run_tandem(*words, stdin="one\ntwo\n", env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("decode") == 2
    assert not (cache / "chat-history").exists()

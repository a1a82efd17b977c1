"""`tandem chat`, and the chat of `tandem run`: messages, and commands that begin with a slash."""

import argparse
import sys
from pathlib import Path

from tandem.cli.chat_file import load_chat, save_chat
from tandem.cli.chat_input import History, MessageReader, Typed
from tandem.cli.failures import failure_json, sentence_of
from tandem.cli.keeping import cache_dir
from tandem.cli.opening import SessionPlan, add_session_arguments
from tandem.cli.session import Session
from tandem.cli.settings import ChatSettings
from tandem.cli.streams import require_text
from tandem.core.errors import ConfigError, TandemError
from tandem.core.registry import nearest_names

COMMANDS = {
    "/set": "/set NAME VALUE changes an option; NAME default resets it; /set alone shows all",
    "/regenerate": "answers the last message again",
    "/clear": "forgets the conversation",
    "/save": "/save FILE writes the conversation to a file",
    "/load": "/load FILE replaces the conversation by a saved one",
    "/help": "shows this",
    "/exit": "leaves, as /quit and Ctrl-D do",
}
_OTHER_NAMES = {"/quit": "/exit"}
_WITH_WORDS = ("/set", "/save", "/load")
_KEYS = (
    "Ctrl-C stops an answer; Alt-Enter adds a line to a message, pasted lines are one message; "
    '""" begins and ends a message of several lines'
)
_HELP = "/exit or Ctrl-D leaves, /help shows all commands, Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tandem chat`."""
    add_session_arguments(parser)


def run(flags: argparse.Namespace) -> int:
    """Load the model and chat; returns the exit code."""
    return chat(SessionPlan(flags).open())


def chat(session: Session) -> int:
    """Chat until /exit or the end of input; returns the exit code."""
    print(f"Chat with the model. {_HELP}.", file=sys.stderr)
    history = History(cache_dir() / "chat-history", is_kept=session.options.history)
    conversation = _Chat(session)
    is_open = True
    while is_open:
        try:
            is_open = conversation.take_turn()
            history.save()
        except KeyboardInterrupt:  # before or after an answer's tokens
            print(file=sys.stderr)
    session.finish()
    return 0


class _Chat:
    """Executes a chat's messages and commands on its session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._settings = ChatSettings(session)
        self._reader = MessageReader(on_interrupt=_HELP)

    def take_turn(self) -> bool:
        """Answer the next message or execute the next command; return False at the chat's end."""
        typed = self._reader.read()
        if typed is None:
            return False
        command = _command_of(typed)
        if command == "/exit":
            return False
        try:
            self._do(command, typed.text)
        except (TandemError, OSError) as error:  # such as a prompt that does not fit
            print(f"error: {sentence_of(error)}", file=sys.stderr)
            if self._session.options.json:
                print(failure_json(error, sentence_of(error)), flush=True)
        return True

    def _do(self, command: str | None, text: str) -> None:
        rest = text.strip().removeprefix(command or "").strip()
        match command:
            case None:
                if text.strip():
                    self._session.ask(text)
            case "/set":
                print(self._settings.set(rest), file=sys.stderr)
            case "/save" | "/load":
                self._keep(command, rest)
            case "/regenerate":
                self._session.regenerate()
            case "/clear":
                num_forgotten = len(self._session.messages)
                self._session.clear()
                num_forgotten -= len(self._session.messages)
                print(f"[{_messages(num_forgotten)} forgotten]", file=sys.stderr)
            case "/help":
                print(_all_commands(), file=sys.stderr)
            case _:
                hint = nearest_names(command, [*COMMANDS, *_OTHER_NAMES])
                print(f"unknown command {command}; {hint}", file=sys.stderr)

    def _keep(self, command: str, name: str) -> None:
        if not require_text(name, "the file's name"):
            raise ConfigError(f"{command} needs the name of a file: {command} chat.json")
        file = Path(name).expanduser()
        if command == "/save":
            save_chat(self._session.messages, file)
        else:
            self._session.go_on_from(load_chat(file))
        what = "written to" if command == "/save" else "read from"
        print(f"[{_messages(len(self._session.messages))} {what} {file}]", file=sys.stderr)


def _messages(count: int) -> str:
    return f"{count} message is" if count == 1 else f"{count} messages are"


def _command_of(typed: Typed) -> str | None:
    """Return the command in a line; None for a message.

    A slash followed by several words or lines, such as a path and a question about it, is a
    message.
    """
    line = typed.text.strip()
    name, _, rest = line.partition(" ")
    is_longer = "\n" in line or (rest and name not in _WITH_WORDS)
    if typed.is_quoted or not line.startswith("/") or is_longer:
        return None
    return _OTHER_NAMES.get(name, name)


def _all_commands() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"{name:<{width}}  {what.removeprefix(name + ' ')}" for name, what in COMMANDS.items()]
    return "\n".join([*lines, _KEYS])

"""Chat files: JSON with roles and texts, in the form of OpenAI's API."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cli.streams import require_text
from tandem.core.errors import FileFormatError

if TYPE_CHECKING:
    from tandem.generate.prompt import Message

_EXPECTED = '{"messages": [{"role": "user", "content": "..."}, ...]}, as /save writes it'
_ROLES = ("system", "user", "assistant")


def save_chat(messages: "list[Message]", file: Path) -> None:
    """Write a chat to a file.

    Raises `FileFormatError` if the chat has images, or if the file exists and is not a chat.
    """
    if any(not isinstance(message["content"], str) for message in messages):
        raise FileFormatError("a chat with images is not saved; /clear begins one without")
    if file.exists():
        load_chat(file)  # raises unless the file is a chat
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps({"messages": messages}, indent=1) + "\n", encoding="utf-8")
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def load_chat(file: Path) -> "list[Message]":
    """Return the chat in a file; raises `OSError`, or `FileFormatError` if it is not a chat."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["messages"]
        chat: list[Message] = [{"role": one["role"], "content": one["content"]} for one in found]
    except (ValueError, KeyError, TypeError, RecursionError):
        chat = [{"role": "", "content": ""}]
    for message in chat:
        if message["role"] not in _ROLES or not isinstance(message["content"], str):
            raise FileFormatError(f"{file} is not a chat; expected {_EXPECTED}")
        require_text(message["content"], str(file))
    return chat

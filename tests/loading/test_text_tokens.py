"""Tests of texts that are too long for any context, and of tokenizers that fail."""

from collections.abc import Callable
from typing import Any

import pytest

from tandem.core.errors import ConfigError
from tandem.dialects.format import ChatFormat
from tandem.generate.prompt import encode_conversation
from tandem.text.text_tokens import TextTooLongError, reported_panics, require_room, token_ids
from tests.hf.tiny import byte_tokenizer

PANIC = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
SPACES = " " * 12_000_000
MESSAGES: list[Any] = [{"role": "user", "content": SPACES}]
CONTEXT = 2048


class Untouched:
    """A tokenizer that fails when it is called."""

    chat_template = None

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, " " * 16: 1}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("this text is not to be tokenized")


class Panicking(Untouched):
    """A tokenizer whose Rust code panics; PyO3 raises a BaseException for it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise PANIC("index out of bounds")


@pytest.mark.parametrize(
    ("tokenizer", "text", "error", "sentence"),
    [
        (Untouched(), SPACES, TextTooLongError, "at least 750000; shorten"),
        (Panicking(), "x", ConfigError, "tokenizer failed at this text"),
    ],
)
def test_texts_that_are_not_tokenized(
    tokenizer: Any, text: str, error: type[ConfigError], sentence: str
) -> None:
    chat = [{"role": "user", "content": text}]
    encode: Callable[[], object]
    for encode in (
        lambda: token_ids(tokenizer, text, has_special=True, most_tokens=CONTEXT),
        lambda: encode_conversation(tokenizer, chat, most_tokens=CONTEXT),
    ):
        with pytest.raises(error, match=sentence):
            encode()


def test_chats_are_refused_too() -> None:
    with pytest.raises(TextTooLongError):
        ChatFormat(byte_tokenizer()).prompt(MESSAGES, [], {}, most_tokens=CONTEXT)


def test_a_text_that_may_fit_is_tokenized() -> None:
    tokenizer = byte_tokenizer()
    longest = max(map(len, tokenizer.get_vocab()))
    require_room(tokenizer, 100_000 * longest, 100_000)
    with pytest.raises(TextTooLongError):
        require_room(tokenizer, 100_000 * longest + 1, 100_000)
    require_room(tokenizer, 10**9, None)


def test_other_ends_pass() -> None:
    with pytest.raises(KeyboardInterrupt), reported_panics():
        raise KeyboardInterrupt

"""Tokenizes text; a text that no context can hold is refused before it is tokenized.

For a text that is too long, a tokenizer needs seconds and hundreds of bytes per token. A Rust panic
in a tokenizer is not an `Exception`. Both cases become a `ConfigError` with one sentence.
"""

import contextlib
import functools
from collections.abc import Iterator

from tandem.core.errors import ConfigError
from tandem.foreign_types import Tokenizer

# Only longer texts are compared with the vocabulary's longest token.
_SHORT_CHARACTERS = 1 << 16
_PANICS = "pyo3_runtime"


class TextTooLongError(ConfigError):
    """A text has more tokens than the model's context holds."""

    def __init__(self, num_tokens: int | str, most_tokens: int) -> None:
        """Make the message; `num_tokens` is a number, or words such as "at least 5000"."""
        super().__init__(
            # Clients recognize a full context by these words of OpenAI's and Anthropic's messages.
            f"the prompt is too long: this model's maximum context length is {most_tokens} tokens "
            f"for prompt and answer together, and the prompt has {num_tokens}; shorten it"
        )


def require_room(tokenizer: Tokenizer, num_characters: int, most_tokens: int | None) -> None:
    """Raise `TextTooLongError` if a text's length alone shows more than `most_tokens` tokens.

    No token is longer than the vocabulary's longest. If `most_tokens` is None, there is no limit.
    """
    if most_tokens is None or num_characters <= _SHORT_CHARACTERS:
        return
    longest = _longest_token(tokenizer)
    if num_characters > most_tokens * longest:
        raise TextTooLongError(f"at least {num_characters // longest}", most_tokens)


@functools.lru_cache(maxsize=4)  # listing a vocabulary takes a tenth of a second
def _longest_token(tokenizer: Tokenizer) -> int:
    return max(map(len, tokenizer.get_vocab()), default=1)


def token_ids(
    tokenizer: Tokenizer, text: str, *, has_special: bool, most_tokens: int | None
) -> list[int]:
    """Return a text's token ids; `has_special` adds the tokenizer's special tokens.

    Raises `ConfigError` if the tokenizer panics, and `TextTooLongError` as `require_room` does: not
    for every text with more than `most_tokens` tokens.
    """
    require_room(tokenizer, len(text), most_tokens)
    with reported_panics():
        # A text that is slightly too long is refused later, with a better message than the
        # tokenizer's.
        encoded = tokenizer(text, add_special_tokens=has_special, verbose=False)
        return list(encoded["input_ids"])


@contextlib.contextmanager
def reported_panics() -> Iterator[None]:
    """Turn a panic of the tokenizer inside the context into `ConfigError`."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != _PANICS:
            raise
        raise ConfigError(
            "the model's tokenizer failed at this text; shorten it, or split its longest words"
        ) from error

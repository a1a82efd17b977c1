"""Converts messages to token ids with the model's chat template, if it has one."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

from tandem.core.errors import ConfigError, first_line
from tandem.decode.images import ImagePrompt, require_images
from tandem.foreign_types import PreTrainedModel, Tokenizer
from tandem.generate.conversation import without_images
from tandem.generate.images import Processor, open_image, write_prompt
from tandem.generate.next_token_models import context_tokens, vocabulary_size
from tandem.text.bounded_template import rendered
from tandem.text.text_tokens import require_room, token_ids


class Message(TypedDict):
    """One turn of a conversation, as chat templates expect it."""

    role: str
    content: str | list[Mapping[str, object]]
    """Text, or a list of parts: {"type": "text", "text": ...} and {"type": "image", "image":
    ...}."""


def encode_messages(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    processor: Processor | None,
    messages: Sequence[Mapping[str, object]],
) -> list[int] | ImagePrompt:
    """Return a conversation as token ids, with its images if it has any.

    Raises `ConfigError` for a prompt that cannot be read, and `UnsupportedModelError` for images if
    the model reads none.
    """
    turns, images = without_images(messages)
    if not images:
        return encode_conversation(tokenizer, messages, most_tokens=context_tokens(model))
    require_images(model)
    if processor is None:
        raise ConfigError(
            "a prompt with images needs the model's processor; give it to Generator "
            "(transformers.AutoProcessor.from_pretrained(...))"
        )
    opened = [open_image(image) for image in images]
    text = _through_template(processor, turns)
    return write_prompt(processor, text, opened, int(model.config.image_token_id))


def encode_conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, object]],
    *,
    most_tokens: int | None = None,
) -> list[int]:
    """Return the token ids of a prompt for the next assistant message.

    Without a chat template the messages are joined as plain text, which base models continue.
    Raises `ConfigError` for an empty prompt, and for text that surely exceeds `most_tokens`.
    """
    texts = [str(message["content"]) for message in messages]
    require_room(tokenizer, sum(map(len, texts)), most_tokens)
    has_template = bool(tokenizer.chat_template)
    text = _through_template(tokenizer, messages) if has_template else "\n".join(texts)
    # A template has written the special tokens.
    ids = token_ids(tokenizer, text, has_special=not has_template, most_tokens=most_tokens)
    if not ids:
        raise ConfigError("the prompt is empty; give some text with -p or on standard input")
    return ids


def _through_template(
    tokenizer: Tokenizer | Processor, messages: Sequence[Mapping[str, object]]
) -> str:
    try:
        return rendered(tokenizer, messages)
    except Exception as error:  # a template is a program that came with the model
        raise ConfigError(
            f"the model's chat template cannot write this conversation: {first_line(error)}; fix "
            "the template (chat_template.jinja or tokenizer_config.json), or remove it to continue "
            "plain text"
        ) from error


def room(model: PreTrainedModel, prompt: Sequence[int], number: int = 0) -> int:
    """Check a prompt; return how many tokens the model's context leaves for its answer.

    Raises `ConfigError` if the prompt is empty, too long or has unknown token ids; `number` is the
    prompt's number in error messages.
    """
    if not prompt:
        raise ConfigError(f"prompt {number} is empty; give some text or at least one token")
    size = vocabulary_size(model)
    unknown = next((token for token in prompt if not 0 <= token < size), None)
    if unknown is not None:
        raise ConfigError(
            f"prompt {number} holds token id {unknown}, but the model knows 0 to {size - 1}; "
            "use the tokenizer that belongs to the model"
        )
    longest = context_tokens(model)
    if longest is None:
        return 1 << 62
    if len(prompt) >= longest:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens and the model's context is {longest}; "
            "shorten the prompt"
        )
    return longest - len(prompt)

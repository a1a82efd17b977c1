"""From messages to token ids: the model's chat template where it has one."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from torch import Tensor

from tandem.core.errors import ConfigError
from tandem.decode.images import ImagePrompt, require_images
from tandem.foreign_types import PreTrainedModel, Tokenizer
from tandem.generate.images import Processor, images_of, without_sources, write_prompt
from tandem.generate.next_token_models import context_tokens, vocabulary_size
from tandem.hf.bounded_template import bounded
from tandem.hf.text_tokens import require_room, token_ids, told_panics


class Message(TypedDict):
    """One turn of a conversation, as chat templates expect it."""

    role: str
    content: str | list[Any]
    """Text; or parts, {"type": "text", "text": ...} and {"type": "image", "image": ...}."""


def encode_conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, object]],
    *,
    most_tokens: int | None = None,
) -> Tensor:
    """Return the token ids (1, n_tokens) that ask for the next assistant message.

    Without a chat template the messages are joined as plain text, so base models continue it.
    Raises `ConfigError` for text of surely more than `most_tokens`.
    """
    texts = [str(message["content"]) for message in messages]
    require_room(tokenizer, sum(map(len, texts)), most_tokens)
    has_template = bool(getattr(tokenizer, "chat_template", None))
    text = _through_template(tokenizer, messages) if has_template else "\n".join(texts)
    require_room(tokenizer, len(text), most_tokens)
    with told_panics():  # a template has written the special tokens
        encoded = tokenizer(text, add_special_tokens=not has_template, return_tensors="pt")
    ids: Tensor = encoded["input_ids"]
    if ids.shape[1] == 0:
        raise ConfigError("the prompt is empty; give some text with -p or on standard input")
    return ids


def _through_template(
    tokenizer: "Tokenizer | Processor", messages: Sequence[Mapping[str, object]]
) -> str:
    def render() -> str:
        text: str = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return text

    try:
        return bounded(render)
    except Exception as error:  # a template is a program that came with the model
        raise _cannot_write(error) from error


def _cannot_write(error: Exception) -> ConfigError:
    why = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    return ConfigError(
        f"the model's chat template cannot write this conversation: {why}; mend the template "
        "(chat_template.jinja or tokenizer_config.json), or remove it to continue plain text"
    )


def encode_with_images(
    model: PreTrainedModel, processor: Processor | None, messages: Sequence[Mapping[str, object]]
) -> ImagePrompt:
    """Return a conversation with images, as its model's processor writes it.

    Raises `UnsupportedModelError` for a model that takes no images, else `ConfigError`.
    """
    require_images(model)
    if processor is None:
        raise ConfigError(
            "a prompt with images needs the model's processor; give it to Generator "
            "(transformers.AutoProcessor.from_pretrained(...))"
        )
    images = images_of(messages)
    text = _through_template(processor, without_sources(messages))
    return write_prompt(processor, text, images, int(model.config.image_token_id))


def encode_text(tokenizer: Tokenizer, text: str, *, most_tokens: int | None = None) -> list[int]:
    """Return the token ids of a text that the model is to continue, as its tokenizer makes them.

    Raises `ConfigError` for text of surely more than `most_tokens`.
    """
    return token_ids(tokenizer, text, has_special=True, most_tokens=most_tokens)


def room(model: PreTrainedModel, prompt: Sequence[int], number: int = 0) -> int:
    """Check a prompt; return how many tokens the model's context has left for its answer.

    Raises `ConfigError`, which names the prompt by its number.
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

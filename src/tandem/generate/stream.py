"""Generates an answer token by token with Transformers' own `generate`, and times it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from tandem.core.errors import ConfigError, UnsupportedModelError
from tandem.generate.sampling import SamplingOptions
from tandem.generate.text import TextStream


@dataclass(frozen=True, slots=True)
class Answer:
    """One generated answer and how long it took."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    time_to_first_token_seconds: float
    decode_seconds: float
    """From the first token to the last."""
    is_interrupted: bool

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens over the time to the first token."""
        return _rate(self.prompt_tokens, self.time_to_first_token_seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first over the time that they took; 0 for a single token."""
        return _rate(len(self.token_ids) - 1, self.decode_seconds)


def generate_answer(
    model: Any,
    tokenizer: Any,
    prompt_ids: Tensor,
    options: SamplingOptions,
    on_text: Callable[[str], None],
) -> Answer:
    """Answer a prompt (1, n_tokens); `on_text` receives the text as it comes.

    Ctrl-C (KeyboardInterrupt) ends the answer, not the program: what is there is returned.
    """
    if not model.can_generate():
        raise UnsupportedModelError(f"{type(model).__name__} cannot generate text")
    _check_context(model, prompt_ids.shape[1])
    streamer = _TimedStreamer(TextStream(tokenizer), on_text)
    if options.seed is not None:
        torch.manual_seed(options.seed)
    is_interrupted = False
    try:
        model.generate(
            prompt_ids.to(model.device),
            attention_mask=torch.ones_like(prompt_ids).to(model.device),
            streamer=streamer,
            pad_token_id=_pad_token_id(model, tokenizer),
            **options.generation_arguments(bool(model.generation_config.do_sample)),
        )
    except KeyboardInterrupt:
        is_interrupted = True
    streamer.flush()
    return streamer.answer(prompt_ids.shape[1], is_interrupted)


def _check_context(model: Any, prompt_tokens: int) -> None:
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and prompt_tokens >= longest:
        raise ConfigError(
            f"the prompt has {prompt_tokens} tokens and the model's context is {longest}; "
            "shorten the prompt"
        )


def _pad_token_id(model: Any, tokenizer: Any) -> int | None:
    if model.generation_config.pad_token_id is not None:
        return None
    pad: int | None = tokenizer.pad_token_id
    return pad if pad is not None else tokenizer.eos_token_id


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 and count > 0 else 0.0


class _TimedStreamer(BaseStreamer):  # type: ignore[misc]
    """Receives the prompt and then each new token from `generate`."""

    def __init__(self, text: TextStream, on_text: Callable[[str], None]) -> None:
        self._text = text
        self._on_text = on_text
        self._ids: list[int] = []
        self._pieces: list[str] = []
        self._started = self._first = self._last = time.perf_counter()
        self._has_seen_prompt = False

    def put(self, value: Tensor) -> None:
        if not self._has_seen_prompt:
            self._has_seen_prompt = True
            return
        self._last = time.perf_counter()
        for token_id in value.flatten().tolist():
            if not self._ids:
                self._first = self._last
            self._ids.append(token_id)
            self._give(self._text.add(token_id))

    def end(self) -> None:
        """Do nothing: `flush` is also called after an interruption."""

    def flush(self) -> None:
        self._give(self._text.finish())

    def answer(self, prompt_tokens: int, is_interrupted: bool) -> Answer:
        return Answer(
            text="".join(self._pieces),
            token_ids=self._ids,
            prompt_tokens=prompt_tokens,
            time_to_first_token_seconds=self._first - self._started,
            decode_seconds=self._last - self._first,
            is_interrupted=is_interrupted,
        )

    def _give(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self._on_text(piece)

"""A tiny model whose answers end only at their token limit."""

from typing import Any

import pytest

import tandem
from tests.architectures import build_tiny_model
from tests.hf.tiny import byte_tokenizer


@pytest.fixture(scope="module")
def model() -> Any:
    model: Any = build_tiny_model("qwen3_moe")
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def generator(model: Any) -> tandem.Generator:
    return tandem.Generator(model, byte_tokenizer())

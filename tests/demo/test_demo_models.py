"""Tests of the built demo models: answers of the dense model, and routing by meaning."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import tandem
from tandem.demo import verify_demo_model
from tests.demo.evidence import greedy_tokens, perplexity, routing, routing_table
from tests.demo.oracle import (
    NUM_WINDOWS,
    ODD_TEXT,
    dense_answers,
    prompt_ids,
    text_windows,
)

pytestmark = [pytest.mark.demo, pytest.mark.usefixtures("all_threads")]


@pytest.fixture(scope="module")
def demo(demo_cache: Path, eager_demo: Any) -> tuple[Any, Any]:
    return eager_demo, AutoTokenizer.from_pretrained(demo_cache / "models" / "demo")


@pytest.mark.slow
def test_demo_is_near_the_dense_model_and_not_equal(demo_cache: Path) -> None:
    """Use Tandem, which is faster; test_through_tandem.py compares it with Transformers."""
    directory = demo_cache / "models" / "demo"
    windows = text_windows(AutoTokenizer.from_pretrained(directory))[:NUM_WINDOWS]
    ours = perplexity(tandem.load(directory, dtype="fp32"), windows)
    ratio = ours / dense_answers().perplexity
    print(f"perplexity of demo over dense: {ratio:.4f}")
    assert 1.01 < ratio < 1.09  # 1.068; over all windows 1.049


def test_demo_answers_sensibly(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    assert "Paris" in tokenizer.decode(greedy_tokens(model, [ids["input_ids"]], 12)[0])


@pytest.mark.slow
def test_tokens_route_by_meaning(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    prompts = torch.tensor([token for ids in prompt_ids(tokenizer) for token in ids])
    prompts = prompts[: len(prompts) // 512 * 512].view(-1, 512)
    layers = routing(model, torch.cat([text_windows(tokenizer)[:2], prompts[:2]]))
    print(routing_table(layers))
    # The first two layers see little but the token itself, and adjacent words differ.
    assert all(layer.neighbour_ratio > 1.1 for layer in layers[2:])
    assert sum(layer.neighbour_ratio for layer in layers) / len(layers) > 1.3
    assert all(max(layer.shares) > 1.3 / 8 for layer in layers)  # not uniform
    assert min(min(layer.shares) for layer in layers) > 0.03  # and no expert is dead
    assert all(0.55 < layer.top_weights[2] < 0.75 for layer in layers)


def test_checkpoint_tokenizer_is_the_dense_one(demo: tuple[Any, Any]) -> None:
    assert demo[1](ODD_TEXT).input_ids == dense_answers().odd_ids
    assert demo[1].decode(dense_answers().odd_ids) == ODD_TEXT
    assert demo[1].tokenize("  5") == ["ĠĠ", "5"]


@pytest.mark.parametrize("kind", ["demo", "demo-equal"])
def test_checkpoint_is_whole_and_names_no_path(demo_cache: Path, kind: str) -> None:
    directory = demo_cache / "models" / kind
    verify_demo_model(directory)
    for path in [*directory.glob("*.json"), *directory.glob("*.md")]:
        if path.name != "tokenizer.json":  # a vocabulary has words like "/home/"
            assert not re.search(r"/(home|root|tmp)/|cache/", path.read_text(encoding="utf-8"))

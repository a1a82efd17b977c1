"""The dense SmolLM2 as an oracle: what `demo-equal` must say, however it is loaded.

Used with plain Transformers here and through Tandem's seam elsewhere.
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tandem.demo.dense import Dense, load_dense
from tandem.demo.fetch import GGUF
from tests.demo.evidence import greedy_tokens, perplexity

DATA = Path(__file__).parent.parent / "data"
NUM_NEW_TOKENS = 8
WINDOW_TOKENS = 512
NUM_WINDOWS = 1  # of eight; docs/demo.md has the figures of all


class Answers(NamedTuple):
    """What a model says on the fixed prompts and text."""

    tokens: list[list[int]]
    perplexity: float


@functools.cache
def dense_model(cache: Path) -> Dense:
    return load_dense(cache / "models" / GGUF.name)


@functools.cache
def dense_answers(cache: Path) -> Answers:
    dense = dense_model(cache)
    return answers(dense.model, dense.tokenizer)


def answers(model: Any, tokenizer: Any, *, num_prompts: int = 5) -> Answers:
    """Ask a float32 model for greedy tokens on the prompts and perplexity on 512 tokens."""
    return Answers(
        greedy_tokens(model, prompt_ids(tokenizer)[:num_prompts], NUM_NEW_TOKENS),
        perplexity(model, text_windows(tokenizer)[:NUM_WINDOWS]),
    )


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of all tokens in fp32."""
    with torch.inference_mode():
        found: torch.Tensor = model(ids).logits.float()
    return found


def prompt_ids(tokenizer: Any) -> list[list[int]]:
    """Return the 20 prompts as ids: code as it stands, the rest as a user's turn."""
    prompts = json.loads((DATA / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    return [
        tokenizer(prompt["text"]).input_ids
        if prompt["kind"] == "code"
        else tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt["text"]}],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        for prompt in prompts
    ]


def text_windows(tokenizer: Any) -> torch.Tensor:
    """Return the first 4,096 tokens of WikiText-2's validation text as (8, 512) ids."""
    text = (DATA / "wikitext_4096.txt").read_text(encoding="utf-8")
    return torch.tensor(tokenizer(text).input_ids[:4096]).view(-1, WINDOW_TOKENS)

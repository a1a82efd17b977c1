"""The dense SmolLM2 as an oracle: the expected answers of `demo-equal`, however it is loaded.

Transformers takes half a minute to read the dense model's GGUF, so its answers are stored in
tests/data/dense_answers.json. This module writes them again:

    python -m tests.demo.oracle
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tandem.cli.keeping import cache_dir
from tandem.demo.dense import load_dense
from tandem.demo.fetch import GGUF
from tests.demo.evidence import greedy_tokens, perplexity

DATA = Path(__file__).parent.parent / "data"
NUM_NEW_TOKENS = 8
WINDOW_TOKENS = 512
_KEPT = DATA / "dense_answers.json"
NUM_WINDOWS = 1  # of eight; docs/demo.md has the figures of all


ODD_TEXT = (
    "In 2024  5 apples cost $12.50,\n  3 pears\t10 <|im_start|>user\ndef f(x):\n    return x9"
)
"""A tokenizer that lost a step splits its digits and spaces differently."""


class Answers(NamedTuple):
    """A model's answers to the fixed prompts and text."""

    tokens: list[list[int]]
    perplexity: float


class DenseAnswers(NamedTuple):
    """The dense model's answers, and its tokenization of unusual text."""

    tokens: list[list[int]]
    perplexity: float
    odd_ids: list[int]


def dense_answers() -> DenseAnswers:
    """Return the stored answers."""
    return DenseAnswers(**json.loads(_KEPT.read_text(encoding="utf-8")))


def write_dense_answers(cache: Path) -> None:
    """Compute and store the answers of the dense model."""
    model, tokenizer = load_dense(cache / "models" / GGUF.name)
    found = DenseAnswers(*answers(model, tokenizer), tokenizer(ODD_TEXT).input_ids)
    _KEPT.write_text(json.dumps(found._asdict()) + "\n", encoding="utf-8")


def answers(model: Any, tokenizer: Any, *, num_prompts: int = 5) -> Answers:
    """Compute a float32 model's greedy tokens for the prompts, and its perplexity on 512 tokens."""
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
    """Return the 20 prompts as ids: code as plain text, the others as a user's turn."""
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


if __name__ == "__main__":
    write_dense_answers(cache_dir())

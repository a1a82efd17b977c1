"""Tests of a limit on reasoning: its end mark is inserted once."""

from typing import Any

import pytest
import torch

from tandem.generate.thinking import BoundedThinking, ThinkingLimit
from tests.architecture_sizes import VOCABULARY
from tests.hf.tiny import byte_tokenizer

END = "</think>"
CLOSING = f"({END})"


def written(text: str, *, num_tokens: int, has_begun: bool, length: int = 60) -> str:
    """Return the output of a model that would write a text and then many dots."""
    tokenizer: Any = byte_tokenizer()
    limit = ThinkingLimit(
        num_tokens=num_tokens, begin="<think>", end=END, closing=CLOSING, has_begun=has_begun
    )
    thinking = BoundedThinking(limit, tokenizer)
    expected = tokenizer(text + "." * length, add_special_tokens=False)["input_ids"]
    found: list[int] = []
    for token in expected[:length]:
        scores = torch.zeros((1, VOCABULARY))
        scores[0, token] = 1.0
        chosen = int(thinking.restrict(scores).argmax())
        assert not thinking.accept(chosen)
        found.append(chosen)
    return str(tokenizer.decode(found))


@pytest.mark.parametrize(
    ("text", "num_tokens", "has_begun", "expected"),
    [
        ("hmhmhm", 3, True, f"hmh{CLOSING}."),
        ("hmhmhm", 0, True, f"{CLOSING}."),
        (f"hm{END}yes", 30, True, f"hm{END}yes."),
        ("<think>hmhmhm", 3, False, f"<think>hmh{CLOSING}."),
        ("Hello,nothing", 3, False, "Hello,nothing."),
        (f"<think>hm{END}<think>again", 30, False, f"<think>hm{END}<think>again."),
    ],
)
def test_thinking_ends_after_so_many_tokens(
    text: str, num_tokens: int, has_begun: bool, expected: str
) -> None:
    assert written(text, num_tokens=num_tokens, has_begun=has_begun).startswith(expected)


def test_what_a_grammar_forbids_does_not_come() -> None:
    tokenizer: Any = byte_tokenizer()
    limit = ThinkingLimit(num_tokens=0, begin="<think>", end=END, closing=CLOSING, has_begun=True)
    thinking = BoundedThinking(limit, tokenizer)
    first, mark = tokenizer(CLOSING)["input_ids"][0], tokenizer(END)["input_ids"]
    nothing = torch.zeros((1, VOCABULARY))
    nothing[0, [first, mark[0]]] = float("-inf")
    for _ in range(2):
        assert torch.equal(thinking.restrict(nothing), nothing)
        thinking.accept(60)
    mark_alone = torch.zeros((1, VOCABULARY))
    mark_alone[0, first] = float("-inf")
    found = []
    for _ in mark:
        found.append(int(thinking.restrict(mark_alone).argmax()))
        thinking.accept(found[-1])
    assert found == mark
    assert torch.equal(thinking.restrict(mark_alone), mark_alone)

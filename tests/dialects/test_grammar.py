"""Grammars of calls: whatever a model's scores, what opens a call goes on as one of the tools'."""

import json
from typing import Any

import llguidance
import pytest
import torch
from llguidance.hf import from_tokenizer

from tandem.dialects.dialect import CALL, END_CALL, END_THINK, THINK
from tandem.dialects.format import ChatFormat
from tandem.dialects.grammar import CallForm, call_grammar, free_grammar
from tandem.engine.constraint import Grammars
from tests.architectures import VOCABULARY
from tests.hf.tiny import byte_tokenizer

END_ID = 2
TOOLS = [("f", {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"],
                "additionalProperties": False})]  # fmt: skip
FORM = CallForm(opening=CALL, closing=END_CALL, think=THINK, end_think=END_THINK)
GOOD = f'{CALL}{{"name":"f","arguments":{{"n":22}}}}{END_CALL}'
BAD = f'{CALL}{{"name":"g"'


def accepts(grammar: str, text: str, tokenizer: Any = None) -> bool:
    """Tell whether an answer may be this text, as a whole."""
    tokenizer = tokenizer or byte_tokenizer()
    matcher = llguidance.LLMatcher(
        from_tokenizer(tokenizer, max(VOCABULARY, len(tokenizer)), [END_ID]), grammar
    )
    ids = tokenizer(text)["input_ids"]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "plain", "thinker", "inside"),
    [
        ("hello", True, True, False),  # the reasoning must end
        (f"Sure.{GOOD}", True, True, False),
        (GOOD + GOOD, True, True, False),
        (f"{GOOD}bye", True, True, False),
        (f"Sure.{BAD}", False, False, False),
        (f"{THINK}{BAD}{END_THINK}ok", False, True, True),  # it may think about calls
        (f"{THINK}a{END_THINK}{GOOD}", True, True, True),
        (f"{THINK}a{END_THINK}{BAD}", False, False, False),
        (f"{BAD}{END_THINK}ok", False, False, True),
    ],
)
def test_only_what_opens_a_call_is_ruled(
    text: str, plain: bool, thinker: bool, inside: bool
) -> None:
    expected = {(False, False): plain, (False, True): thinker, (True, True): inside}
    for (is_thinking, can_think), is_accepted in expected.items():
        grammar = free_grammar(
            TOOLS, FORM, is_thinking=is_thinking, can_think=can_think, has_one_call=False
        )
        assert accepts(grammar, text) is is_accepted, (is_thinking, can_think)


def test_after_the_only_call_nothing_follows() -> None:
    grammar = free_grammar(TOOLS, FORM, is_thinking=False, can_think=False, has_one_call=True)
    assert accepts(grammar, "hello")
    assert accepts(grammar, f"Sure.{GOOD}")
    assert not accepts(grammar, f"{GOOD}.")
    assert not accepts(grammar, GOOD + GOOD)


def test_marks_may_be_tokens_of_their_own() -> None:
    tokenizer = byte_tokenizer()
    special = [CALL, END_CALL, THINK, END_THINK]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    form = ChatFormat(tokenizer).marks
    assert form.special >= set(special)
    free = free_grammar(TOOLS, form, is_thinking=False, can_think=True, has_one_call=False)
    for grammar in (free, call_grammar(TOOLS, form)):
        assert accepts(grammar, GOOD, tokenizer)
        assert not accepts(grammar, BAD, tokenizer)
    assert accepts(free, f"{THINK}a{END_THINK}Sure.{GOOD}", tokenizer)


@pytest.mark.parametrize("seed", range(4))
def test_any_scores_make_a_call_once_it_is_opened(seed: int) -> None:
    tokenizer = byte_tokenizer()
    grammar = free_grammar(TOOLS, FORM, is_thinking=False, can_think=False, has_one_call=True)
    constraint = Grammars(tokenizer, VOCABULARY, [END_ID]).constraint(grammar)
    chance = torch.Generator().manual_seed(seed)
    text = f"x<y{CALL}"
    for token in tokenizer(text)["input_ids"]:
        scores = torch.rand((1, VOCABULARY), generator=chance)
        assert constraint.restrict(scores)[0, token] == scores[0, token]
        assert not constraint.accept(token)
    for _ in range(200):
        scores = constraint.restrict(torch.randn((1, VOCABULARY), generator=chance))
        token = int(scores.argmax())
        text += tokenizer.decode([token])
        if constraint.accept(token):
            break
    call = json.loads(text.removeprefix(f"x<y{CALL}").removesuffix(END_CALL))
    assert call["name"] == "f"
    assert call["arguments"]["n"] in (1, 22)

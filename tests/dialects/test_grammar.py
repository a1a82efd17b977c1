"""Tests of grammars for calls: a call that has begun is always a valid call of a given tool."""

import json
from typing import Any

import llguidance
import pytest
import torch
from llguidance.hf import from_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tandem.core.errors import ConfigError
from tandem.dialects.dialect import CALL, END_CALL, END_THINK, THINK
from tandem.dialects.families import HERMES
from tandem.dialects.format import ChatFormat
from tandem.dialects.grammar import (
    call_grammar,
    json_grammar,
    written_grammar,
)
from tandem.dialects.native_grammar import NativeForm, native_grammar
from tandem.engine.constraint import GrammarConstraint, Grammars
from tests.architecture_sizes import VOCABULARY
from tests.hf.tiny import byte_tokenizer

END_ID = 2
TOOLS = [("f", {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"],
                "additionalProperties": False})]  # fmt: skip
assert HERMES.written is not None
FORM = NativeForm(written=HERMES.written, think=THINK, end_think=END_THINK, ids={})
GOOD = f'{CALL}{{"name":"f","arguments":{{"n":22}}}}{END_CALL}'
BAD = f'{CALL}{{"name":"g"'


def accepts(grammar: str, text: str, tokenizer: Any = None) -> bool:
    """Tell whether the grammar accepts this text as a whole answer."""
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
        grammar = native_grammar(
            TOOLS, FORM, is_thinking=is_thinking, can_think=can_think, has_one_call=False
        )
        assert accepts(grammar, text) is is_accepted, (is_thinking, can_think)


def test_after_the_only_call_nothing_follows() -> None:
    grammar = native_grammar(TOOLS, FORM, is_thinking=False, can_think=False, has_one_call=True)
    assert accepts(grammar, "hello")
    assert accepts(grammar, f"Sure.{GOOD}")
    assert not accepts(grammar, f"{GOOD}.")
    assert not accepts(grammar, GOOD + GOOD)


def test_marks_may_be_tokens_of_their_own() -> None:
    tokenizer = byte_tokenizer()
    special = [CALL, END_CALL, THINK, END_THINK]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    chat = ChatFormat(tokenizer)
    assert chat.marks.special >= set(special)
    assert chat.native is not None
    assert set(special) <= set(chat.native.ids)
    free = native_grammar(TOOLS, chat.native, is_thinking=False, can_think=True, has_one_call=False)
    for grammar in (free, call_grammar(TOOLS, chat.marks)):
        assert accepts(grammar, GOOD, tokenizer)
        assert not accepts(grammar, BAD, tokenizer)
    assert accepts(free, f"{THINK}a{END_THINK}Sure.{GOOD}", tokenizer)


@pytest.mark.parametrize("seed", range(4))
def test_any_scores_make_a_call_once_it_is_opened(seed: int) -> None:
    tokenizer = byte_tokenizer()
    grammar = native_grammar(TOOLS, FORM, is_thinking=False, can_think=False, has_one_call=True)
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


@pytest.mark.parametrize("is_closed", [False, True])
def test_an_object_of_many_optional_properties_can_be_written(is_closed: bool) -> None:
    names = [f"property_{number}_name" for number in range(400)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    grammar = json_grammar(schema | {"additionalProperties": not is_closed})
    constraint = Grammars(byte_tokenizer(), VOCABULARY, [END_ID]).constraint(grammar)
    text = json.dumps(dict.fromkeys(names[::7], "x"), separators=(",", ":"))
    for token in byte_tokenizer()(text)["input_ids"]:
        assert constraint.restrict(torch.zeros(1, VOCABULARY))[0, token] == 0
        constraint.accept(token)


def test_an_answer_ends_where_its_masks_take_too_long() -> None:
    tokenizer = byte_tokenizer()
    tables = from_tokenizer(tokenizer, VOCABULARY, [END_ID])
    grammar = written_grammar('start: s\ns: s s | s s s | "a" | "b"')
    (token,) = tokenizer("a")["input_ids"]
    constraint = GrammarConstraint(tables, grammar, VOCABULARY, slow_mask_seconds=0.0)

    def follow() -> None:
        for _ in range(2000):
            constraint.restrict(torch.zeros(1, VOCABULARY))
            constraint.accept(token)

    with pytest.raises(ConfigError, match="seconds a token to be followed; the answer ended here"):
        follow()


ANY = {"type": "object", "properties": {
    "n": {"type": "integer"}, "text": {"type": "string"}, "kind": {"enum": ["a", "b"]},
    "tags": {"type": "array", "items": {"type": "string"}}}}  # fmt: skip
BOTH = [("look", ANY), ("now", {"type": "object", "properties": {}})]
# A mark in the chat template: a correct call, and beginnings that are not calls.
NATIVE = {
    "<|tool_call_begin|>": (
        '<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"n":5}<|tool_call_end|>',
        ["<|tool_call_begin|>functions.other:", '<|tool_call_begin|>functions.look:0{"n"',
         '<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"n":"x"'],
    ),
    "<｜tool▁call▁begin｜>": (
        '<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"n":5}<｜tool▁call▁end｜>',
        ["<｜tool▁call▁begin｜>other<", '<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"n":"'],
    ),
    "[TOOL_CALLS][ARGS]": ('[TOOL_CALLS]look[ARGS]{"n":5}', ["[TOOL_CALLS]other["]),
    "minimax:tool_call": (
        '<invoke name="look">\n<parameter name="n">5</parameter>\n<parameter name="text">a\n<b>'
        "</parameter>\n</invoke>",
        ['<invoke name="other"', '<invoke name="look">\n<parameter name="x"',
         '<invoke name="look">\n<parameter name="n">five'],
    ),
    "<arg_key>": (
        "<tool_call>look\n<arg_key>kind</arg_key>\n<arg_value>b</arg_value>\n<arg_key>tags"
        '</arg_key>\n<arg_value>["x"]</arg_value>\n</tool_call>',
        ["<tool_call>other", "<tool_call>look\n<arg_key>x", "<tool_call>look\n<arg_key>kind"
         "</arg_key>\n<arg_value>c"],
    ),
    "<function=<parameter=": (
        "<tool_call>\n<function=look>\n<parameter=text>\na\nb\n</parameter>\n<parameter=n>\n5\n"
        "</parameter>\n</function>\n</tool_call>",
        ["<tool_call>\n<function=other", "<function=look>\n<parameter=x", "<function=look>\n5"],
    ),
}  # fmt: skip
MARKS = [
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "[TOOL_CALLS]",
    "[ARGS]", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<tool_call>",
    "[THINK]", "[/THINK]", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>",
]  # fmt: skip


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("mark", NATIVE)
def test_calls_are_ruled_in_their_own_form(mark: str, has_tokens: bool) -> None:
    """Test calls as plain text, and calls between special tokens."""
    tokenizer = text_tokenizer(MARKS if has_tokens else [])
    tokenizer.chat_template = f"{{# tools {mark} <think> #}}"
    native = ChatFormat(tokenizer).native
    assert native is not None
    good, bad = NATIVE[mark]
    for is_thinking, can_think in ((False, False), (False, True), (True, True)):
        grammar = native_grammar(
            BOTH, native, is_thinking=is_thinking, can_think=can_think, has_one_call=False
        )
        before = f"hm{native.end_think}" if is_thinking else ""
        for text in ("yes", good, f"Sure. {good}", good + good):
            if mark != "[TOOL_CALLS][ARGS]" or not text.endswith(good + good):
                assert accepts(grammar, before + text, tokenizer), text
        for text in bad:
            assert not accepts(grammar, before + text, tokenizer), text
        if can_think:
            thought = f"{'' if is_thinking else native.think}{bad[0]}{native.end_think}ok"
            assert accepts(grammar, thought, tokenizer)
    only = native_grammar(BOTH, native, is_thinking=False, can_think=False, has_one_call=True)
    assert accepts(only, good, tokenizer)
    assert not accepts(only, good + good, tokenizer)


def text_tokenizer(special: list[str]) -> Any:
    """Return a byte tokenizer with marks as special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {c: i + 3 for i, c in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer

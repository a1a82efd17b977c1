"""Grammars of answers, as llguidance writes them: JSON of a schema, calls of tools.

A grammar travels as text: it is written and checked in the grammar process, and followed where
tokens are chosen (`tandem.engine.constraint`). Loads no torch.

What following a grammar costs at each token is bounded. An object of 190 optional properties needs
between 3,000 and 5,000 items in a step, in masks of 1 ms; 7,000 items of a grammar made to be slow
(`s: s s | s s s | "a" | "b"`) take 40 ms, 10,000 of them 110. So items are limited by what objects
need, and the time of an answer's masks besides: `python -m benchmarks.server.grammar_masks`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import llguidance
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from tandem.core.errors import ConfigError

LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2_000,
    step_max_items=7_000,
    step_lexer_fuel=200_000,
    verbose_errors=False,  # else an error repeats the grammar and the answer
)
# One space at most: without a bound a weak model writes white space for ever, and pretty JSON costs
# twice the tokens.
_COMPACT = {"whitespace_pattern": " ?"}
# Where a JSON schema holds others: by name; as a list or alone.
_NAMED_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions"}
_SCHEMAS = {"items", "prefixItems", "anyOf", "oneOf", "additionalProperties"}
# What else says which properties an object has.
_OPENING = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
_SPACE_RULE = 'space: (" " | "\\n")?'


def json_grammar(schema: Mapping[str, object]) -> str:
    """Return the grammar of a JSON schema's documents; `ConfigError` if it cannot be followed."""
    return checked(
        llguidance.LLMatcher.grammar_from_json_schema(dict(schema), overrides=_COMPACT)  # type: ignore[arg-type]
    )


def regex_grammar(pattern: str) -> str:
    """Return the grammar of the texts that a regular expression matches as a whole."""
    return checked(llguidance.LLMatcher.grammar_from_regex(pattern), "regular expression")


def choice_grammar(texts: Sequence[str]) -> str:
    """Return the grammar of one of some texts."""
    # A terminal: alternatives of a rule are items that the parser holds, each of them.
    written = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    lark = f"start: CHOICE\nCHOICE: {written}"
    return checked(llguidance.LLMatcher.grammar_from_lark(lark), "choice")


def written_grammar(text: str) -> str:
    """Return a grammar that a client wrote: in Lark's form, or in llama.cpp's GBNF."""
    try:
        lark = any_to_lark(text)
    except (GbnfToLarkError, ValueError, LookupError, RecursionError) as error:
        raise ConfigError(complaint(str(error))) from error
    return checked(llguidance.LLMatcher.grammar_from_lark(lark), "grammar")


def closed_objects(schema: Mapping[str, object]) -> dict[str, object]:
    """Return a schema whose objects have no properties but those that it names.

    That is what OpenAI means by a strict schema. An object that says otherwise itself, or that is
    put together of several schemas, stays as it is.
    """
    found: dict[str, object] = {}
    for name, value in schema.items():
        if name in _NAMED_SCHEMAS and isinstance(value, dict):
            found[name] = {key: _closed(one) for key, one in value.items()}
        elif name in _SCHEMAS:
            found[name] = [_closed(o) for o in value] if isinstance(value, list) else _closed(value)
        else:
            found[name] = value
    if "properties" in schema and not _OPENING & schema.keys():
        found["additionalProperties"] = False
    return found


def _closed(schema: object) -> object:
    return closed_objects(schema) if isinstance(schema, dict) else schema


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How a model's answers are marked; `special` are the marks that are tokens of their own."""

    opening: str
    closing: str
    """What stands around {"name": ..., "arguments": ...}."""
    think: str
    end_think: str
    special: frozenset[str] = frozenset()

    def mark(self, text: str) -> str:
        """Return a mark as grammars write it."""
        return text if text in self.special else json.dumps(text)

    def up_to(self, name: str, text: str) -> tuple[str, str]:
        """Return (item, its rule) for any text that ends with the first mark."""
        before = "ANY" if text == self.end_think else "TEXT"
        if text in self.special:
            return f"{before}? {text}", ""
        return name, f"{name}[lazy]: {before} {json.dumps(text)}\n"


# Tools as (name, schema of the arguments).
Tools = Sequence[tuple[str, Mapping[str, object]]]
_ANY = r"(.|\n)*"


def call_grammar(
    tools: Tools, form: CallForm, *, or_json: Mapping[str, object] | None = None
) -> str:
    """Return the grammar of one call of one of some tools, or of a document of `or_json`.

    A line may end after the mark that opens a call and before the one that closes it.
    """
    lark = f"{_call_rules(tools, form)}call: {form.mark(form.opening)} rest\nstart: call"
    if or_json is not None:
        lark += f" | %json {ruled(or_json)}"
    return checked(llguidance.LLMatcher.grammar_from_lark(lark))


def free_grammar(
    tools: Tools, form: CallForm, *, is_thinking: bool, can_think: bool, has_one_call: bool
) -> str:
    """Return the grammar of any text, in which whatever opens a call goes on as one.

    The reasoning, which has begun (`is_thinking`) or may come first (`can_think`), holds no calls.
    After a call that must be the only one nothing follows.
    """
    opened, rules = form.up_to("opened", form.opening)
    before, text = "", f"/{_ANY}/"
    if is_thinking or can_think:
        before, more = form.up_to("thought", form.end_think)
        rules += more
    if can_think and not is_thinking:
        before = f"({form.mark(form.think)} {before})?"
        if form.think not in form.special:  # else no text begins so
            text += f" & ~/{re.escape(form.think)}{_ANY}/"
    answer = "(call | TEXT?)" if has_one_call else "call* TEXT?"
    lark = (
        f"ANY: /{_ANY}/\nTEXT: {text}\n{rules}{_call_rules(tools, form)}"
        f"call: {opened} rest\nstart: {before} {answer}"
    )
    return checked(llguidance.LLMatcher.grammar_from_lark(lark))


def _call_rules(tools: Tools, form: CallForm) -> str:
    """Return the rule of what follows the mark that opens a call."""
    calls = []
    for name, schema in tools:
        words = ["{", '"name":', f"{json.dumps(name)},", '"arguments":']
        calls.append(f"({_spaced(words)} space %json {ruled(schema)} space {_spaced(['}'])})")
    around = ("space", f"({' | '.join(calls)})", "space", form.mark(form.closing))
    return f"{_SPACE_RULE}\nrest: {' '.join(around)}\n"


def ruled(schema: Mapping[str, object]) -> str:
    """Return a schema as grammars hold it."""
    return json.dumps({**schema, "x-guidance": _COMPACT})


def _spaced(words: Sequence[str]) -> str:
    return " space ".join(json.dumps(word) for word in words)


def checked(grammar: str, what: str = "schema") -> str:
    """Return a grammar that can be followed; raises `ConfigError` for another."""
    problem = llguidance.LLMatcher.validate_grammar(grammar, limits=LIMITS)
    if problem and not problem.startswith("WARNING"):
        raise ConfigError(complaint(problem, what))
    return grammar


def complaint(message: str, what: str = "grammar") -> str:
    """Return the sentence for what llguidance says of a grammar that it cannot follow."""
    return f"the {what} cannot be followed: {message.strip().partition(chr(10))[0]}"

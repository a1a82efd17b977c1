"""Grammars of answers in llguidance's form: JSON documents of a schema, and tool calls.

A grammar travels as text: it is written and checked in the grammar process, and followed where
tokens are chosen (`tandem.engine.constraint`). This module loads no torch.

The cost of following a grammar is bounded at each token. An object of 190 optional properties needs
between 3,000 and 5,000 items in a step, in masks of 1 ms; 7,000 items of a grammar made to be slow
(`s: s s | s s s | "a" | "b"`) take 40 ms, and 10,000 items take 110 ms. So the number of items is
limited to what objects need; the total time of an answer's masks is limited, too.
`python -m benchmarks.server.grammar_masks` measures these costs.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import llguidance
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from tandem.core.errors import ConfigError

LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2_000,
    step_max_items=7_000,
    step_lexer_fuel=200_000,
    verbose_errors=False,  # otherwise an error repeats the grammar and the answer
)
# At most one space. Without a bound a weak model writes white space forever, and indented JSON
# costs twice the tokens.
_COMPACT = {"whitespace_pattern": " ?"}
# Keys of a JSON schema that hold other schemas: by name; in a list or alone.
_NAMED_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions"}
_SCHEMAS = {"items", "prefixItems", "anyOf", "oneOf", "additionalProperties"}
# Other keys that define an object's properties.
_OPENING = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
SPACE_RULE = 'space: (" " | "\\n")?\n'


def json_grammar(schema: Mapping[str, object]) -> str:
    """Return the grammar of documents under a JSON schema; `ConfigError` if it is unsupported."""
    return checked(
        llguidance.LLMatcher.grammar_from_json_schema(dict(schema), overrides=_COMPACT)  # type: ignore[arg-type]
    )


def regex_grammar(pattern: str) -> str:
    """Return the grammar of texts that a regular expression matches completely."""
    return checked(llguidance.LLMatcher.grammar_from_regex(pattern), "regular expression")


def choice_grammar(texts: Sequence[str]) -> str:
    """Return the grammar that allows exactly one of these texts."""
    # A terminal, because the parser keeps an item for each alternative of a rule.
    written = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    lark = f"start: CHOICE\nCHOICE: {written}"
    return checked(llguidance.LLMatcher.grammar_from_lark(lark), "choice")


def written_grammar(text: str) -> str:
    """Return a client's grammar, written in Lark or llama.cpp's GBNF, in llguidance's form.

    Raises `ConfigError` if the grammar cannot be converted or followed.
    """
    try:
        lark = any_to_lark(text)
    except (GbnfToLarkError, ValueError, LookupError, RecursionError) as error:
        raise ConfigError(complaint(str(error))) from error
    return checked(llguidance.LLMatcher.grammar_from_lark(lark), "grammar")


def closed_objects(schema: Mapping[str, object]) -> dict[str, object]:
    """Return a schema whose objects allow no properties besides those they name.

    Nested objects are included. This is OpenAI's meaning of a strict schema. An object is left open
    if it has `additionalProperties` or `patternProperties`, refers to another schema, or combines
    schemas.
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
    """The marks around calls in a model's answers; marks in `special` are single tokens."""

    opening: str
    closing: str
    """`opening` and `closing` surround {"name": ..., "arguments": ...}."""
    special: frozenset[str] = frozenset()

    def mark(self, text: str) -> str:
        """Return a mark in grammar syntax."""
        return text if text in self.special else json.dumps(text)


# Tools as (name, schema of the arguments).
Tools = Sequence[tuple[str, Mapping[str, object]]]


def call_grammar(
    tools: Tools, form: CallForm, *, or_json: Mapping[str, object] | None = None
) -> str:
    """Return the grammar of one call of one of these tools, or of a document under `or_json`.

    One space or newline is allowed after the opening mark and before the closing mark of a call.
    """
    calls = " | ".join(call_object(name, schema) for name, schema in tools)
    marks = form.mark(form.opening), form.mark(form.closing)
    lark = f"{SPACE_RULE}call: {marks[0]} space ({calls}) space {marks[1]}\nstart: call"
    if or_json is not None:
        lark += f" | %json {ruled(or_json)}"
    return checked(llguidance.LLMatcher.grammar_from_lark(lark))


def call_object(name: str, schema: Mapping[str, object]) -> str:
    """Return a grammar item for a call as a JSON object; the grammar must have `SPACE_RULE`."""
    words = ["{", '"name":', f"{json.dumps(name)},", '"arguments":']
    head = " space ".join(json.dumps(word) for word in words)
    return f'({head} space %json {ruled(schema)} space "}}")'


def ruled(schema: Mapping[str, object]) -> str:
    """Return a schema as JSON text for a grammar, which allows at most one space between tokens."""
    return json.dumps({**schema, "x-guidance": _COMPACT})


def checked(grammar: str, what: str = "schema") -> str:
    """Return the grammar if it is valid; raises `ConfigError` otherwise."""
    problem = llguidance.LLMatcher.validate_grammar(grammar, limits=LIMITS)
    if problem and not problem.startswith("WARNING"):
        raise ConfigError(complaint(problem, what))
    return grammar


def complaint(message: str, what: str = "grammar") -> str:
    """Return one sentence from llguidance's message about a grammar that it refuses."""
    return f"the {what} cannot be followed: {message.strip().partition(chr(10))[0]}"

"""Grammars of answers that may call tools, from tools as clients describe them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tandem.core.errors import ConfigError
from tandem.dialects.grammar import CallForm, call_grammar, json_grammar
from tandem.dialects.native_grammar import NativeForm, native_grammar

ANY_OBJECT: Mapping[str, object] = {"type": "object"}


class DescribedTool(NamedTuple):
    """A tool that may be called."""

    name: str
    schema: Mapping[str, object]
    is_strict: bool
    """Whether a schema that no grammar supports is an error; otherwise any object is allowed."""


def calls_or_json(
    tools: Sequence[DescribedTool], form: CallForm, schema: Mapping[str, object]
) -> str:
    """Return the grammar of answers that are one call, or a JSON document that follows `schema`."""
    return call_grammar(_followed(tools), form, or_json=schema)


def free_calls(
    tools: Sequence[DescribedTool],
    form: NativeForm,
    *,
    is_thinking: bool,
    can_think: bool,
    has_one_call: bool,
) -> str | None:
    """Return the grammar of free text with constrained calls; None if it cannot be written.

    For calls written as JSON objects, raises `ConfigError` instead of returning None.
    """
    rules = _followed(tools)
    try:
        return native_grammar(
            rules, form, is_thinking=is_thinking, can_think=can_think, has_one_call=has_one_call
        )
    except ConfigError:  # no grammar: the answer is only parsed
        if form.written.is_object:
            raise
        return None


def _followed(tools: Sequence[DescribedTool]) -> list[tuple[str, Mapping[str, object]]]:
    """Return the (name, schema) pairs from which the tools' grammars are made.

    A schema without a grammar becomes one that allows any object; raises `ConfigError` if the tool
    is strict.
    """
    found: list[tuple[str, Mapping[str, object]]] = []
    for name, schema, is_strict in tools:
        try:
            json_grammar(schema)
        except ConfigError:
            if is_strict:
                raise
            schema = ANY_OBJECT
        found.append((name, schema))
    return found

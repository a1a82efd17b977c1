"""Grammars of free answers in a family's own form: text that opens a call must become a tool call.

Other text and reasoning are free. Forms that tag each argument allow arguments in any order. Their
grammars enforce the names of arguments and the form of values, but not required arguments.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import llguidance

from tandem.core.errors import ConfigError
from tandem.dialects.arguments import type_names
from tandem.dialects.dialect import WrittenCall
from tandem.dialects.grammar import (
    SPACE_RULE,
    Tools,
    call_object,
    checked,
    json_grammar,
    ruled,
)

_NAME = r"/[A-Za-z0-9_.-]+/"
_ANY = r"(.|\n)*"


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeForm:
    """How one model writes calls; `ids` maps the marks that are single tokens to their ids."""

    written: WrittenCall
    think: str
    end_think: str
    ids: Mapping[str, int]

    def item(self, text: str) -> str:
        """Return a text in grammar syntax; its line breaks are optional."""
        special = "|".join(map(re.escape, sorted(self.ids, key=len, reverse=True)))
        parts = re.split(f"({special}|\n)" if special else "(\n)", text)
        return " ".join(self._part(part) for part in parts if part)

    def _part(self, part: str) -> str:
        if part == "\n":
            return "nl"
        return f"<[{self.ids[part]}]>" if part in self.ids else json.dumps(part)

    @property
    def own_ids(self) -> list[int]:
        """The ids of the single tokens that occur in the marks of calls."""
        written = self.written
        texts = (written.opening, written.after_name, written.closing, *written.around)
        text = " ".join((*texts, *(written.argument or ())))
        return sorted(number for mark, number in self.ids.items() if mark in text)

    def up_to(self, mark: str) -> str:
        """Return a grammar item for any text that ends with the first occurrence of the mark."""
        if mark in self.ids:
            return f"{self._before(mark)}? <[{self.ids[mark]}]>"
        return f"up_to_{_number(mark)}"

    def rule_up_to(self, mark: str) -> str:
        """Return the rule for the item of `up_to`; empty if the item needs no rule."""
        if mark in self.ids:
            return ""
        return f"up_to_{_number(mark)}[lazy]: {self._before(mark)} {json.dumps(mark)}\n"

    def _before(self, mark: str) -> str:
        return "TEXT" if mark == self.written.opening else "ANY"


def native_grammar(
    tools: Tools, form: NativeForm, *, is_thinking: bool, can_think: bool, has_one_call: bool
) -> str:
    """Return the grammar of free text in which any opening mark must begin a call of these tools.

    `is_thinking` says that the prompt has opened the reasoning, `can_think` that the answer may
    begin with reasoning. With `has_one_call` no text or call may follow a call. Raises
    `ConfigError` if no such grammar can be written.
    """
    written = form.written
    marks = [written.opening, *([form.end_think] if is_thinking or can_think else [])]
    if written.argument is not None:
        marks.append(written.argument[2])
    text = f"/{_ANY}/"
    if can_think and not is_thinking and form.think.strip() not in form.ids:
        # Text must not begin with the mark that opens reasoning.
        text += f" & ~/{re.escape(form.think.strip())}{_ANY}/"
    rules = [
        f'ANY: /{_ANY}/\nTEXT: {text}\nnl: "\\n"?\n{SPACE_RULE if written.is_object else ""}',
        *(form.rule_up_to(mark) for mark in dict.fromkeys(marks)),
    ]
    calls = [f"tool_{number}" for number in range(len(tools))]
    for number, (name, schema) in enumerate(tools):
        rules += _tool_rules(form, number, name, schema)
    around = [form.item(mark) for mark in written.around]
    space = "space" if written.is_object else ""
    rules.append(f"call: {form.up_to(written.opening)} {space} ({' | '.join(calls)}) {space}")
    rules.append(f"{form.item(written.closing)}\n")
    alone = [item for item in around if item.startswith("<[")]
    free = f"(TEXT? ({' | '.join(alone)}))" if alone else ""
    if has_one_call:
        after = f"(nl ({' | '.join(around)}))* nl" if around else "nl"
        body = f"{free and free + '*'} (call {'' if written.is_object else after} | TEXT?)"
    else:
        body = f"(call{f' | {free}' if free else ''})* TEXT?"
    rules.append(f"start: {_thought(form, is_thinking=is_thinking, can_think=can_think)} {body}\n")
    lark = "".join(rule if rule.endswith("\n") else f"{rule} " for rule in rules if rule)
    return checked(llguidance.LLMatcher.grammar_from_lark(lark))


def _thought(form: NativeForm, *, is_thinking: bool, can_think: bool) -> str:
    """Return the grammar item of the reasoning, in which marks of calls are ordinary text.

    The item is empty if the answer has no reasoning.
    """
    marks = form.own_ids
    thought = f"(ANY? <[{','.join(map(str, marks))}]>)* " if marks else ""
    thought += form.up_to(form.end_think)
    if is_thinking:
        return thought
    return f"({form.item(form.think.strip())} {thought})?" if can_think else ""


def _tool_rules(
    form: NativeForm, number: int, name: str, schema: Mapping[str, object]
) -> Iterator[str]:
    written = form.written
    if written.is_object:
        yield f"tool_{number}: {call_object(name, schema)}\n"
        return
    head = [form.item(written.before_name), json.dumps(name)]
    if written.is_numbered:
        head.append('":" /[0-9]+/')
    head.append(form.item(written.after_name))
    if written.argument is None:
        head.append(f"%json {ruled(schema)}")
    else:
        arguments = list(_arguments(form, number, schema))
        for i, argument in enumerate(arguments):
            yield f"argument_{number}_{i}: {argument}\n"
        if arguments:
            names = " | ".join(f"argument_{number}_{i}" for i in range(len(arguments)))
            head.append(f"({names})*")
    yield f"tool_{number}: {' '.join(filter(None, head))}\n"


def _arguments(form: NativeForm, number: int, schema: Mapping[str, object]) -> Iterator[str]:
    """Yield the grammar item of each argument that a tool takes."""
    assert form.written.argument is not None
    before, between, close = form.written.argument
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else None
    for key in known if known is not None else (None,):
        own = known[key] if known is not None else {}
        own = {**own, "$defs": schema["$defs"]} if "$defs" in schema and own else own
        written = _NAME if key is None else json.dumps(key, ensure_ascii=False)
        yield f"{form.item(before)} {written} {form.item(between)} {_value(form, own, close)} nl"


def _value(form: NativeForm, schema: object, close: str) -> str:
    """Return the grammar item of an argument's value and the mark that closes it."""
    if isinstance(schema, dict):
        choices = schema.get("enum")
        if isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices):
            return f"({' | '.join(map(json.dumps, choices))}) nl {form.item(close)}"
        types = set(type_names(schema))
        if types and "string" not in types and _can_rule(schema):
            return f"%json {ruled(schema)} nl {form.item(close)}"
    return form.up_to(close)


def _can_rule(schema: Mapping[str, object]) -> bool:
    try:
        json_grammar(schema)
    except ConfigError:
        return False
    return True


def _number(mark: str) -> str:
    """Return a mark in hexadecimal, for the name of its rule."""
    return mark.encode().hex()

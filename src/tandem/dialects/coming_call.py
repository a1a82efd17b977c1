"""Parses tool calls while their text is generated; emits arguments as soon as they are certain.

Emitted parts are never withdrawn: once the arguments of a known tool's call have begun, it remains
a call even if the model then breaks its own format, as in other servers. Before that, the region
may still turn out to be plain text.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tandem.dialects.arguments import (
    Schemas,
    json_values,
    nested,
    python_calls,
    tagged,
    value_of,
)
from tandem.dialects.dialect import Dialect

# Text before the arguments of a call written as an object, which may be in a list.
_HEAD = re.compile(r'[\[\s,]*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:')
# Text after the arguments, which may contain an id.
_AFTER = re.compile(r'\s*(?:,\s*"[^"\\]*"\s*:\s*"[^"\\]*"\s*)*\}')
_BEGINNING = re.compile(r'\s*(\{\s*["}])')


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call, or its beginning."""

    name: str
    arguments: str
    """JSON text, as far as it has arrived."""


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A part of an answer; exactly one field is set."""

    content: str = ""
    reasoning: str = ""
    call: Call | None = None
    arguments: str = ""
    """The next part of the latest call's arguments."""


class ComingCalls:
    """Parses the tool calls in one region of an answer while the region's text arrives."""

    def __init__(self, dialect: Dialect, name: str | None, schemas: Schemas) -> None:
        """Begin a region; `name` is the tool's name from the region's opening mark, if it has one.

        `schemas` has the known tools and the types of their arguments.
        """
        self._values, self._schemas = dialect.values, schemas
        self._tag = re.compile(dialect.tag, re.DOTALL)
        self._name, self._is_named = name, "transform" in dialect.calls
        self._text, self._place = "", 0  # text up to _place is processed
        self._object: _JsonObject | None = None  # the arguments that are being received
        self._has_begun, self._is_first = False, True
        streams = ("tagged", "nested") if self._is_named else ()
        self._is_held = dialect.values not in ("json", *streams) or (
            self._is_named and name not in schemas
        )

    def feed(self, text: str) -> Iterator[AnswerPart]:
        """Add the region's next text; yield the parts of calls that are now certain."""
        self._text += text
        if not self._is_held:
            yield from self._json() if self._values == "json" else self._tags()

    def finish(self, value: Any) -> list[AnswerPart]:
        """Return the remaining parts of calls at the region's end.

        `value` is what Transformers' parser made of the region. Raises `ValueError`, `KeyError`,
        `TypeError` or `RecursionError` if the region holds no call.
        """
        if self._values in ("tagged", "nested"):
            return self._rest_of_tags(value)
        if self._has_begun and (self._is_named or self._object is not None):
            return []
        if self._is_named and self._values == "json":
            function = value["function"]
            (arguments,) = json_values(function["arguments"] or "{}")
            return [_whole(function["name"], arguments)]
        try:
            return [*self._whole_calls(value)]
        except ValueError:
            if not self._has_begun:
                raise
            return []

    # ---- JSON ------------------------------------------------------------------------------------

    def _json(self) -> Iterator[AnswerPart]:
        while True:
            if self._object is None and not self._find_object():
                return
            assert self._object is not None
            piece, self._place = self._object.take(self._text, self._place)
            if piece:
                yield self._part(piece)
            if not self._object.has_ended or self._is_named:
                return
            if (after := _AFTER.match(self._text, self._place)) is None:
                return
            self._place, self._object, self._is_first = after.end(), None, True

    def _find_object(self) -> bool:
        """Find the next arguments' beginning; return False if no arguments can be streamed yet."""
        if self._is_named and self._has_begun:
            return False
        place = self._place
        if not self._is_named:
            if (head := _HEAD.match(self._text, place)) is None:
                return False
            self._name, place = head[1], head.end()
            self._is_held = self._name not in self._schemas
        beginning = _BEGINNING.match(self._text, place)
        if beginning is None or self._is_held:
            return False
        self._place, self._object = beginning.start(1), _JsonObject()
        return True

    def _part(self, piece: str) -> AnswerPart:
        if self._is_first:
            self._is_first, self._has_begun = False, True
            return AnswerPart(call=Call(str(self._name), piece))
        return AnswerPart(arguments=piece)

    def _whole_calls(self, value: object) -> Iterator[AnswerPart]:
        """Yield the remaining calls, from the region's text or from the parser's result `value`."""
        if self._values == "python":
            value = python_calls(self._text)
        elif self._values == "json":
            rest = self._text[self._place :]
            if self._has_begun:
                rest = rest.strip(" \n,]")
            value = json_values(rest) if rest or not self._has_begun else []
        for one in value if isinstance(value, list) else [value]:
            function = one.get("function", one) if isinstance(one, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError("a call has no name")
            arguments = function.get("arguments", function.get("parameters", {}))
            yield _whole(function["name"], arguments)

    # ---- tags ------------------------------------------------------------------------------------

    def _tags(self) -> Iterator[AnswerPart]:
        schema = self._schemas.get(str(self._name), {})
        if self._values == "nested":
            found = nested(self._text, self._place)
        else:
            found = tagged(self._text, self._tag, self._place)
        for argument in found:
            self._place = argument.end
            value = json.dumps(value_of(argument, schema), ensure_ascii=False)
            before = "{" if self._is_first else ", "
            yield self._part(f"{before}{json.dumps(argument.key, ensure_ascii=False)}: {value}")

    def _rest_of_tags(self, value: Any) -> list[AnswerPart]:
        self._name = self._name or value["function"]["name"]
        parts = [*self._tags()]
        end = self._part("{}" if self._is_first else "}")
        if not self._is_held or not parts:
            return [*parts, end]
        first = parts[0].call
        assert first is not None
        rest = "".join(part.arguments for part in (*parts[1:], end))
        return [AnswerPart(call=Call(first.name, first.arguments + rest))]


class _JsonObject:
    """Finds the end of one JSON object in a text without parsing the object's content."""

    def __init__(self) -> None:
        self._depth, self._is_in_string, self._is_escaped = 0, False, False
        self.has_ended = False

    def take(self, text: str, first: int) -> tuple[str, int]:
        """Return the characters from offset `first` that belong to the object, and the next offset.

        If the object has not ended, these are all characters of `text` from `first`.
        """
        place = first
        while place < len(text) and not self.has_ended:
            self._pass(text[place])
            place += 1
        return text[first:place], place

    def _pass(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_in_string:
            self._is_escaped = character == "\\"
            self._is_in_string = character != '"'
        elif character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.has_ended = self._depth == 0


def _whole(name: str, arguments: object) -> AnswerPart:
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return AnswerPart(call=Call(name.strip(), arguments))

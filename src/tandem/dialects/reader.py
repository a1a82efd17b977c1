"""Takes what a model wrote apart into reasoning, text and calls of tools, however it is cut."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tandem.dialects.arguments import Schemas, python_calls, typed
from tandem.dialects.dialect import Values

_REASONING = ("reasoning_content", "reasoning", "thinking")
# What a broken format raises in Transformers' parser, and in ours.
_BROKEN = (ValueError, KeyError, TypeError)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A part of an answer: exactly one field is there."""

    content: str = ""
    reasoning: str = ""
    call: Call | None = None


class AnswerReader:
    """Takes one answer apart as it comes. Spaces at a part's beginning are the format's."""

    def __init__(
        self,
        template: Mapping[str, object],
        prefix: str,
        begun: str,
        *,
        values: Values = "json",
        schemas: Schemas | None = None,
        opening: str = "",
    ) -> None:
        """Read by a response template; `begun` is what the prompt has opened already.

        `opening` is what a call begins with, for one that turns out to be text. `schemas` say of
        what type the arguments are, where `values` leaves that to them.
        """
        from transformers.utils.chat_parsing import ResponseParser

        self._parser = ResponseParser(dict(template), prefix=prefix)
        self._values, self._schemas, self._opening = values, schemas or {}, opening
        self._is_at_start = {"content": True, "reasoning": True}
        self._is_broken = False
        self._open_call = ""  # the text of a call that has not ended
        if begun:
            self._parser.feed(begun)

    def feed(self, text: str) -> list[AnswerPart]:
        """Take the next text; return the parts that are certain."""
        if self._is_broken:
            return [AnswerPart(content=text)] if text else []
        found: list[AnswerPart] = []
        try:
            found.extend(self._parts(self._parser.feed(text)))
        except _BROKEN:  # the model broke its own format: plain text
            self._is_broken = True
            found.append(AnswerPart(content=self._open_call + text))
        return found

    def finish(self) -> list[AnswerPart]:
        """Return what was held back."""
        if self._is_broken:
            return []
        found: list[AnswerPart] = []
        try:
            found.extend(self._parts(self._parser.finalize()[1]))
        except _BROKEN:
            if self._open_call:
                found.append(AnswerPart(content=self._open_call))
        return found

    def _parts(self, events: Sequence[Mapping[str, object]]) -> Iterator[AnswerPart]:
        for event in events:
            field = event.get("field")
            if field == "tool_calls":
                yield from self._call_parts(event)
            elif event["type"] == "region_chunk" and not event.get("dirty"):
                text = str(event.get("text") or "")
                if field in _REASONING and (text := self._stripped("reasoning", text)):
                    yield AnswerPart(reasoning=text)
                elif field == "content" and (text := self._stripped("content", text)):
                    yield AnswerPart(content=text)
            elif field != "content":  # what stood around calls
                self._is_at_start["content"] = True

    def _call_parts(self, event: Mapping[str, object]) -> Iterator[AnswerPart]:
        if event["type"] == "region_open":
            self._open_call = self._opening
        elif event["type"] == "region_chunk":
            self._open_call += str(event.get("text") or "")
        else:
            written, self._open_call = self._open_call, ""
            self._is_at_start["content"] = True
            try:
                calls = list(self._calls(event.get("value")))
            except _BROKEN:  # a call that is none is text
                yield AnswerPart(content=written)
            else:
                yield from (AnswerPart(call=call) for call in calls)

    def _calls(self, value: object) -> Iterator[Call]:
        """Yield the calls that a region holds: one, a list, or Python; raises for a broken one."""
        if self._values == "python" and isinstance(value, str):
            value = python_calls(value)
        for one in value if isinstance(value, list) else [value]:
            function = one.get("function", one) if isinstance(one, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError("a call has no name")
            name = function["name"].strip()
            arguments = function.get("arguments", function.get("parameters", {}))
            arguments = typed(arguments, self._values, self._schemas.get(name, {}))
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            yield Call(name, arguments)

    def _stripped(self, part: str, text: str) -> str:
        if self._is_at_start[part]:
            text = text.lstrip()
            self._is_at_start[part] = not text
        return text

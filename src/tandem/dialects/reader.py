"""Splits an answer into reasoning, text and tool calls, in whatever pieces it arrives."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.dialects.arguments import Schemas
from tandem.dialects.coming_call import AnswerPart, ComingCalls
from tandem.dialects.dialect import Dialect

_REASONING = ("reasoning_content", "reasoning", "thinking")
# Exceptions of Transformers' parser and ours for a broken format.
_BROKEN = (ValueError, KeyError, TypeError, RecursionError)


class AnswerReader:
    """Splits one answer while it is generated.

    White space at the start of a part belongs to the format and is removed.
    """

    def __init__(
        self,
        template: Mapping[str, object],
        prefix: str,
        begun: str,
        dialect: Dialect,
        schemas: Schemas | None = None,
    ) -> None:
        """Prepare to read with a response template.

        `prefix` is the prompt's text if the template reads it. `begun` is the mark of a part that
        the prompt has opened. `dialect` says how calls are written; `schemas` has the known tools
        and their arguments.
        """
        self._template, self._prefix, self._begun = dict(template), prefix, begun
        self._dialect, self._schemas = dialect, schemas or {}
        self._is_at_start = {"content": True, "reasoning": True}
        self._is_broken = False
        self._calls: ComingCalls | None = None
        self._open_text = ""  # text of calls that have not begun and may turn out to be plain text

    @functools.cached_property
    def _parser(self) -> Any:
        """The template's parser; it is created with the first text, as it cannot be pickled."""
        parser = _parser(self._template, self._prefix)
        if self._begun:
            parser.feed(self._begun)
        return parser

    def feed(self, text: str) -> list[AnswerPart]:
        """Add the next text; return the parts that are now certain."""
        if self._is_broken:
            return [AnswerPart(content=text)] if text else []
        found: list[AnswerPart] = []
        try:
            found.extend(self._parts(self._parser.feed(text)))
        except _BROKEN:  # the model broke its own format: treat the rest as plain text
            self._is_broken = True
            found.append(AnswerPart(content=self._open_text + text))
        return found

    def finish(self) -> list[AnswerPart]:
        """Return the remaining parts at the answer's end."""
        if self._is_broken:
            return []
        found: list[AnswerPart] = []
        try:
            found.extend(self._parts(self._parser.finalize()[1]))
        except _BROKEN:
            if self._open_text:
                found.append(AnswerPart(content=self._open_text))
        return found

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> Iterator[AnswerPart]:
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
            elif field != "content":  # text between calls
                self._is_at_start["content"] = True

    def _call_parts(self, event: Mapping[str, Any]) -> Iterator[AnswerPart]:
        if event["type"] == "region_open":
            self._open_text = self._dialect.opening
            name = event.get("captures", {}).get("name")
            self._calls = ComingCalls(self._dialect, name and name.strip(), self._schemas)
        elif event["type"] == "region_chunk" and self._calls is not None:
            text = str(event.get("text") or "")
            self._open_text += text
            yield from self._calls.feed(text)
        elif self._calls is not None:
            written, self._open_text = self._open_text, ""
            self._is_at_start["content"] = True
            try:
                yield from self._calls.finish(event.get("value"))
            except _BROKEN:  # not a call, so it is text
                yield AnswerPart(content=written)

    def _stripped(self, part: str, text: str) -> str:
        if self._is_at_start[part]:
            text = text.lstrip()
            self._is_at_start[part] = not text
        return text


def _parser(template: dict[str, object], prefix: str) -> Any:
    """Return Transformers' parser, changed to report a pattern's named groups at each opening.

    The original parser reports the groups only at the end of a region, too late for a stream. If a
    version of the parser has other internals, calls are reported as a whole.
    """
    from transformers.utils.chat_parsing import ResponseParser

    class Parser(ResponseParser):  # type: ignore[misc]
        def _open_explicit(self, events: list[dict[str, Any]], field: Any, match: Any) -> None:
            super()._open_explicit(events, field, match)
            events[-1]["captures"] = match.groupdict()

    return Parser(template, prefix=prefix)

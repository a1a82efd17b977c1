"""What a family of models writes around reasoning and calls, for Transformers' response parser."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# How the text of a call's arguments is turned into values: "json" by the response parser itself;
# "text" by the tool's schema, because models write strings and numbers alike; "marked": a string
# is marked as one; "python" is a list of calls as Python writes them.
Values = Literal["json", "text", "marked", "python"]
Fields = Mapping[str, object]

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
"""Hermes' marks, which grammars rule calls by."""
# Text that is read over: a region that ends where it begins.
_EMPTY = {"close_pattern": r"(?=[\s\S])", "content": "text", "repeats": True}
_NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One family's way to write."""

    name: str
    marks: tuple[tuple[str, ...], ...]
    """Texts by which a chat template is known: all of one of these groups."""
    calls: Fields
    """The response template's field of calls."""
    values: Values = "json"
    opening: str = ""
    """What a call begins with, to be shown again where one turns out to be none."""
    think: str = THINK
    end_think: str = END_THINK
    thinks_by: str = ""
    """What shows that a chat template reasons, where the mark itself does not stand in it."""
    thoughts: Fields | None = None
    """The response template's field of reasoning; None: what stands between the two marks."""
    around: str | None = None
    """A pattern of what stands around calls and is no text; read over if there are tools."""
    beside: str | None = None
    """A pattern of what is no text in any answer."""
    answers_after: str = ""
    """What an answer that a grammar rules begins after."""
    tools_text: str | None = None
    """How tools are described, where a template writes calls and describes none; with {tools}."""
    special: frozenset[str] = field(default_factory=frozenset)
    """Marks that may be special tokens, which texts leave out unless they are asked for."""

    def fields(self, *, has_tools: bool, thinks: bool) -> dict[str, object]:
        """Return the fields of a response template for an answer."""
        found: dict[str, object] = {}
        if thinks:
            found["reasoning_content"] = self.thoughts or {
                "open": self.think, "close": self.end_think, "content": "text", "repeats": True,
            }  # fmt: skip
        if has_tools:
            found["tool_calls"] = self.calls
            if self.around is not None:
                found["around"] = {"open_pattern": self.around, **_EMPTY}
        if self.beside is not None:
            found["beside"] = {"open_pattern": self.beside, **_EMPTY}
        return found


def named_calls(open_pattern: str, close_pattern: str, **content: object) -> Fields:
    """Return a field of calls whose name stands in what opens them, as a group `name`."""
    return {
        "open_pattern": open_pattern,
        "close_pattern": close_pattern,
        "repeats": True,
        "transform": _NAMED_CALL,
        **(content or {"content": "json"}),
    }


def tagged(tag_pattern: str) -> dict[str, object]:
    """Return how arguments are read that have a tag each, with groups `key` and `value`."""
    return {"content": "xml-inline", "content_args": {"tag_pattern": tag_pattern}}

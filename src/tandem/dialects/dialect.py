"""How a model family writes reasoning and calls, as input of Transformers' response parser."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# How calls are written. "json": one or more objects with a name and arguments, or the arguments
# alone if the opening mark contains the name. "tagged": a tag for each argument. The tool's schema
# decides the value's type, unless the tag states it, because models write strings and numbers
# alike. "nested": tags within tags. "python": a list of calls in Python's syntax. "parsed": the
# response parser's result.
Values = Literal["json", "tagged", "nested", "python", "parsed"]
Fields = Mapping[str, object]

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
"""Hermes' marks, which grammars rule calls by."""
# Skipped text: a region that ends where it begins.
_EMPTY = {"close_pattern": r"(?=[\s\S])", "content": "text", "repeats": True}
_NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCall:
    """The texts of which a call consists, for a grammar."""

    opening: str
    """From here on a text is a call."""
    before_name: str = ""
    after_name: str = ""
    closing: str = ""
    argument: tuple[str, str, str] | None = None
    """What stands before, in and after a key with its value; None: the arguments are JSON."""
    is_object: bool = False
    """Whether name and arguments are fields of one JSON object."""
    is_numbered: bool = False
    """Whether a colon and the call's number follow its name."""
    around: tuple[str, ...] = ()
    """Marks that may stand before and after calls."""
    unless: tuple[str, ...] = ()
    """Texts in a chat template that show another form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The writing conventions of one model family."""

    name: str
    marks: tuple[tuple[str, ...], ...]
    """Texts by which a chat template is known: all of one of these groups."""
    calls: Fields
    """The response template's field of calls."""
    values: Values = "json"
    tag: str = ""
    """A pattern of one argument, with groups `key` and `value`, and `type` if the tag tells it."""
    opening: str = ""
    """What a call begins with, to be shown again where one turns out to be none."""
    think: str = THINK
    end_think: str = END_THINK
    after_thought: str = ""
    """What follows the mark that ends reasoning, where that is no empty line."""
    thinks_by: str = ""
    """What shows that a chat template reasons, where the mark itself does not stand in it."""
    thoughts: Fields | None = None
    """The response template's field of reasoning; None: what stands between the two marks."""
    around: str | None = None
    """A pattern of what stands around calls and is no text; read over if there are tools."""
    beside: str | None = None
    """A pattern of what is no text in any answer."""
    written: WrittenCall | None = None
    """What a grammar of free answers rules calls by; None: none does, or Hermes' own."""
    answers_after: str = ""
    """What an answer that a grammar rules begins after."""
    tools_text: str | None = None
    """How tools are described, where a template writes calls and describes none; with {tools}."""
    special: frozenset[str] = field(default_factory=frozenset)
    """Marks that may be special tokens, which texts leave out unless they are asked for."""

    @property
    def closing(self) -> str:
        """The text that ends reasoning on the model's behalf."""
        if self.after_thought or self.end_think != END_THINK:
            return self.end_think + self.after_thought
        return f"\n{self.end_think}\n\n"

    def fields(self, *, has_tools: bool, thinks: bool) -> dict[str, object]:
        """Return the fields of a response template for this dialect."""
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


def marked_calls(open_pattern: str, close: str) -> Fields:
    """Return a template field for regions between two marks that hold calls as text."""
    return {"open_pattern": open_pattern, "close": close, "repeats": True, "content": "text"}


def named_calls(open_pattern: str, close_pattern: str, **content: object) -> Fields:
    """Return a template field for calls named in their opening mark, by a group `name`."""
    return {
        "open_pattern": open_pattern,
        "close_pattern": close_pattern,
        "repeats": True,
        "transform": _NAMED_CALL,
        **(content or {"content": "text"}),
    }

"""How a model family writes reasoning and calls, as input for Transformers' response parser."""

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
"""Hermes' marks; grammars constrain the calls between them."""
# Skipped text: a region that ends where it begins.
_EMPTY = {"close_pattern": r"(?=[\s\S])", "content": "text", "repeats": True}
_NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCall:
    """The texts of which a call consists, for a grammar."""

    opening: str
    """The text that begins a call."""
    before_name: str = ""
    after_name: str = ""
    closing: str = ""
    argument: tuple[str, str, str] | None = None
    """The texts before a key, between key and value, and after the value; None: JSON arguments."""
    is_object: bool = False
    """Whether name and arguments are fields of one JSON object."""
    is_numbered: bool = False
    """Whether the name is followed by a colon and the call's number."""
    around: tuple[str, ...] = ()
    """Marks that may stand before and after calls."""
    unless: tuple[str, ...] = ()
    """If a chat template contains one of these texts, the model writes calls in another form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The writing conventions of one model family."""

    name: str
    marks: tuple[tuple[str, ...], ...]
    """Groups of texts; a chat template is of this family if it has all texts of one group."""
    calls: Fields
    """The response template's field for calls."""
    values: Values = "json"
    tag: str = ""
    """A pattern of one argument, with groups `key` and `value`, and `type` if tags state a type."""
    opening: str = ""
    """The mark that begins a call; it is returned as text if what follows is not a call."""
    think: str = THINK
    end_think: str = END_THINK
    after_thought: str = ""
    """The text after the end-of-reasoning mark; empty: an empty line after `</think>`, nothing
    after other marks."""
    thinks_by: str = ""
    """A text by which a chat template shows that the model reasons, if it does not contain the
    mark."""
    thoughts: Fields | None = None
    """The response template's field for reasoning; None: text between `think` and `end_think`."""
    around: str | None = None
    """A pattern of text around calls, which is skipped if the request has tools."""
    skipped: str | None = None
    """A pattern of text that is skipped in every answer."""
    written: WrittenCall | None = None
    """The texts of a call, for grammars of free answers; None: no grammar constrains calls."""
    answers_after: str = ""
    """The text that is added to the prompt before a constrained answer."""
    tools_text: str | None = None
    """A description of the tools, with {tools}, for templates that write calls but describe no
    tools."""
    special: frozenset[str] = field(default_factory=frozenset)
    """Marks that may be special tokens; decoded text omits special tokens unless requested."""

    @property
    def closing(self) -> str:
        """The text that Tandem adds to an answer to end the reasoning."""
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
        if self.skipped is not None:
            found["skipped"] = {"open_pattern": self.skipped, **_EMPTY}
        return found


def marked_calls(open_pattern: str, close: str) -> Fields:
    """Return a response-template field for calls between two marks; their text stays unparsed."""
    return {"open_pattern": open_pattern, "close": close, "repeats": True, "content": "text"}


def named_calls(open_pattern: str, close_pattern: str, **content: object) -> Fields:
    """Return a response-template field for calls whose opening mark contains the tool's name.

    `open_pattern` captures the name in a group `name`. `content` says how to parse the arguments;
    without it they stay text.
    """
    return {
        "open_pattern": open_pattern,
        "close_pattern": close_pattern,
        "repeats": True,
        "transform": _NAMED_CALL,
        **(content or {"content": "text"}),
    }

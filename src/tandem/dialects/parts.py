"""What an answer is taken apart into: text, reasoning and calls of tools."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool, or its beginning."""

    name: str
    arguments: str
    """JSON text, as far as it has come."""


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A part of an answer: exactly one field is there."""

    content: str = ""
    reasoning: str = ""
    call: Call | None = None
    arguments: str = ""
    """More of the latest call's arguments."""

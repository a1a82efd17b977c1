"""The tools of the Responses API as functions of a chat, and their calls as the API's own items.

A custom tool, whose input is a text, is a function with one argument. The tools of a namespace are
functions whose names begin with the namespace.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tandem.apis.answering import new_id
from tandem.apis.responses.schemas import CustomTool, FunctionTool, NamespaceTool
from tandem.apis.responses.schemas import Tool as ResponsesTool
from tandem.apis.schemas import FunctionDefinition, Tool
from tandem.dialects.arguments import json_value

_INPUT = "input"
_INPUT_SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {_INPUT: {"type": "string", "description": "the whole input, as plain text"}},
    "required": [_INPUT],
    "additionalProperties": False,
}


class CalledTool(NamedTuple):
    """The fields of a call's output item that identify the called tool."""

    name: str
    namespace: str | None
    is_custom: bool
    """Whether the tool's input is plain text instead of JSON."""


@dataclass(frozen=True, slots=True)
class KnownTool:
    """A tool as the client described it."""

    tool: FunctionTool | CustomTool
    namespace: str | None = None

    @property
    def called(self) -> "CalledTool":
        """The fields that identify this tool in the output items of its calls."""
        return CalledTool(self.tool.name, self.namespace, isinstance(self.tool, CustomTool))

    def as_function(self, name: str) -> Tool:
        """Return the chat function that stands for this tool, under `name`."""
        tool = self.tool
        if isinstance(tool, FunctionTool):
            parameters, strict, description = tool.parameters, tool.strict, tool.description
        else:
            parameters, strict, description = _INPUT_SCHEMA, None, _described(tool)
        function = FunctionDefinition(
            name=name, description=description, parameters=parameters, strict=strict
        )
        return Tool.model_construct(type="function", function=function)


def _described(tool: CustomTool) -> str | None:
    form = tool.format or {}
    if form.get("type") != "grammar":
        return tool.description
    grammar = f"The input follows this {form.get('syntax', '')} grammar:\n{form.get('definition')}"
    return "\n\n".join(filter(None, (tool.description, grammar)))


def known_tools(tools: list[ResponsesTool] | None) -> dict[str, KnownTool]:
    """Return the tools by the names of the chat functions that stand for them."""
    found: dict[str, KnownTool] = {}
    for tool in tools or ():
        if isinstance(tool, NamespaceTool):
            for inner in tool.tools:
                found[flat_name(inner.name, tool.name)] = KnownTool(inner, tool.name)
        else:
            found[tool.name] = KnownTool(tool)
    return found


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name of a tool's chat function; it begins with the namespace, if there is one."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def as_arguments(text: str) -> str:
    """Return a custom tool's text input as JSON arguments of its chat function."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


class OpenCall:
    """An output item for a tool call that is still being generated."""

    def __init__(self, name: str, known: Mapping[str, CalledTool]) -> None:
        """Begin an item for a call of chat function `name`, which may be missing in `known`."""
        found = known.get(name)
        self.is_custom = found is not None and found.is_custom
        self.arguments = ""
        self.item: dict[str, object] = {
            "id": new_id("ctc" if self.is_custom else "fc", "_"),
            "type": "custom_tool_call" if self.is_custom else "function_call",
            "call_id": new_id("call", "_"),
            "name": name if found is None else found.name,
            **({"input": ""} if self.is_custom else {"arguments": "", "status": "in_progress"}),
        }
        if found is not None and found.namespace is not None:
            self.item["namespace"] = found.namespace

    @property
    def kind(self) -> str:
        """The type of the call's events, without the ending `.delta` or `.done`."""
        of = "custom_tool_call_input" if self.is_custom else "function_call_arguments"
        return f"response.{of}"

    def end(self, status: str) -> dict[str, object]:
        """Complete the item; return the fields of the call's `.done` event."""
        if self.is_custom:
            self.item[_INPUT] = _input_of(self.arguments)
            return {_INPUT: self.item[_INPUT]}
        self.item |= {"arguments": self.arguments, "status": status}
        return {"arguments": self.arguments, "name": self.item["name"]}


def _input_of(arguments: str) -> str:
    """Return a custom tool's input: the string argument `input`, else the text of all arguments."""
    parsed = json_value(arguments)
    found = parsed.get(_INPUT) if isinstance(parsed, dict) else None
    return found if isinstance(found, str) else arguments

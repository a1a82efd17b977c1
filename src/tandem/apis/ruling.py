"""Chooses the grammar that constrains an answer, from the fields of a body and from its tools.

The fields are OpenAI's `response_format`, and those that vLLM and llama.cpp add. This module knows
bodies and grammars, but neither prompts nor tokens.
"""

from collections.abc import Mapping
from functools import partial

from tandem.apis.errors import ApiError
from tandem.apis.schemas import ChatRequest, ResponseFormat, Sampling, Tool, ToolChoice
from tandem.dialects.arguments import json_value
from tandem.dialects.grammar import (
    CallForm,
    call_grammar,
    choice_grammar,
    closed_objects,
    json_grammar,
    regex_grammar,
    written_grammar,
)
from tandem.dialects.tool_grammar import ANY_OBJECT, DescribedTool, calls_or_json

# Writes a grammar. Only the grammar process calls it, because it may take long.
GrammarWriter = partial[str] | partial[str | None]


def chat_grammar(body: ChatRequest, tools: list[Tool], marks: CallForm) -> GrammarWriter | None:
    """Return a writer of the grammar that a chat's answer follows from its start; None: no grammar.

    Raises `ApiError` for invalid or conflicting fields.
    """
    choice = body.tool_choice
    if isinstance(choice, ToolChoice) or choice == "required":
        callable_tools = _callable_tools(choice, tools)
        return partial(call_grammar, [(tool.name, tool.schema) for tool in callable_tools], marks)
    schema = _schema(body.response_format)
    if tools and schema is not None:
        return partial(calls_or_json, described_tools(tools), marks, schema)
    return text_grammar(body)


def text_grammar(body: Sampling) -> GrammarWriter | None:
    """Return a writer of the grammar of an answer without tool calls; None: no grammar.

    Raises `ApiError` for invalid or conflicting fields.
    """
    guides = _guides(body)
    if len(guides) > 1:
        raise ApiError(400, f"{' and '.join(guides)} are given; give only one of them")
    return next(iter(guides.values()), None)


def _guides(body: Sampling) -> dict[str, partial[str]]:
    """Return the grammar writers that a body requests, by the name of the requesting field."""
    outputs = body.structured_outputs
    schemas = {
        "response_format": _schema(body.response_format),
        "json_schema": body.json_schema,
        "guided_json": _parsed_schema(body.guided_json),
    }
    texts = {
        "guided_regex": (body.guided_regex, regex_grammar),
        "guided_grammar": (body.guided_grammar, written_grammar),
        "grammar": (body.grammar, written_grammar),
    }
    choices = {"guided_choice": body.guided_choice}
    if outputs is not None:
        schemas["structured_outputs.json"] = _parsed_schema(outputs.json_schema)
        schemas["structured_outputs.json_object"] = ANY_OBJECT if outputs.json_object else None
        texts["structured_outputs.regex"] = (outputs.regex, regex_grammar)
        texts["structured_outputs.grammar"] = (outputs.grammar, written_grammar)
        choices["structured_outputs.choice"] = outputs.choice
    return {
        **{name: partial(json_grammar, one) for name, one in schemas.items() if one is not None},
        **{name: partial(make, one) for name, (one, make) in texts.items() if one is not None},
        **{name: partial(choice_grammar, one) for name, one in choices.items() if one is not None},
    }


def _parsed_schema(schema: Mapping[str, object] | str | None) -> Mapping[str, object] | None:
    """Return a JSON schema, parsed if it was sent as text; None for None.

    Raises `ApiError` if it is not a JSON object.
    """
    parsed = json_value(schema) if isinstance(schema, str) else schema
    if parsed is not None and not isinstance(parsed, Mapping):
        raise ApiError(400, "the schema of the answer is not a JSON object")
    return parsed


def _schema(form: ResponseFormat | None) -> Mapping[str, object] | None:
    """Return the JSON schema that an answer must follow; None: the answer is free text."""
    if form is None or form.type == "text":
        return None
    if form.json_schema is None:
        if form.type == "json_schema" and form.outer_schema is None:
            raise ApiError(
                400, "response_format json_schema needs json_schema", param="response_format"
            )
        return form.outer_schema or ANY_OBJECT
    if form.type == "json_object":
        return ANY_OBJECT
    schema = form.json_schema.json_schema or ANY_OBJECT
    return closed_objects(schema) if form.json_schema.strict else schema


def _callable_tools(choice: ToolChoice | str, tools: list[Tool]) -> list[DescribedTool]:
    """Return the tools that a required call may name; raises `ApiError` if there are none."""
    if not tools:
        raise ApiError(400, "tool_choice asks for a call, but there are no tools", param="tools")
    chosen = choice.function.name if isinstance(choice, ToolChoice) else None
    callable_tools = [tool for tool in described_tools(tools) if chosen in (None, tool.name)]
    if not callable_tools:
        raise ApiError(400, f"tool_choice names {chosen!r}, which is not one of the tools")
    return callable_tools


def described_tools(tools: list[Tool]) -> list[DescribedTool]:
    """Return tools in the form that grammars take."""
    return [
        DescribedTool(tool.function.name, _arguments(tool), bool(tool.function.strict))
        for tool in tools
    ]


def _arguments(tool: Tool) -> Mapping[str, object]:
    schema = tool.function.parameters or ANY_OBJECT
    return closed_objects(schema) if tool.function.strict else schema

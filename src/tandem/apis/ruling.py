"""Which grammar rules an answer: of a response format, of vLLM's and llama.cpp's fields, of tools.

Knows bodies and grammars; neither prompts nor tokens.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tandem.apis.errors import ApiError
from tandem.apis.schemas import ChatRequest, ResponseFormat, Sampling, Tool, ToolChoice
from tandem.core.errors import ConfigError
from tandem.dialects.grammar import (
    CallForm,
    call_grammar,
    choice_grammar,
    closed_objects,
    json_grammar,
    regex_grammar,
    written_grammar,
)

_ANY_OBJECT: Mapping[str, object] = {"type": "object"}
# (name, schema of the arguments)
ToolRule = tuple[str, Mapping[str, object]]


def chat_grammar(body: ChatRequest, tools: list[Tool], marks: CallForm) -> str | None:
    """Return the grammar that rules an answer from its first word, if there is one.

    Raises `ApiError` or `ConfigError` for one that cannot be followed.
    """
    choice = body.tool_choice
    if isinstance(choice, ToolChoice) or choice == "required":
        return call_grammar(_wanted(choice, tools), marks)
    schema = _schema(body.response_format)
    if tools and schema is not None:
        return call_grammar(followed(tools), marks, or_json=schema)
    return text_grammar(body)


def text_grammar(body: Sampling) -> str | None:
    """Return the grammar of an answer that calls nothing, if there is one."""
    guides = _guides(body)
    if len(guides) > 1:
        raise ApiError(400, f"{' and '.join(guides)} rule one answer; give one of them")
    return next(iter(guides.values()))() if guides else None


def _guides(body: Sampling) -> dict[str, Callable[[], str]]:
    """Return what makes a grammar, by the field that asks for it."""
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
        schemas["structured_outputs.json_object"] = _ANY_OBJECT if outputs.json_object else None
        texts["structured_outputs.regex"] = (outputs.regex, regex_grammar)
        texts["structured_outputs.grammar"] = (outputs.grammar, written_grammar)
        choices["structured_outputs.choice"] = outputs.choice
    return {
        **{name: _bound(json_grammar, one) for name, one in schemas.items() if one is not None},
        **{name: _bound(make, one) for name, (one, make) in texts.items() if one is not None},
        **{name: _bound(choice_grammar, one) for name, one in choices.items() if one is not None},
    }


def _bound(make: Callable[[Any], str], value: object) -> Callable[[], str]:
    return lambda: make(value)


def _parsed_schema(schema: Mapping[str, object] | str | None) -> Mapping[str, object] | None:
    """Return a schema that may have been sent as text."""
    if not isinstance(schema, str):
        return schema
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ApiError(400, "the schema of the answer is not a JSON object")
    return parsed


def _schema(form: ResponseFormat | None) -> Mapping[str, object] | None:
    """Return the schema that an answer must follow; None: none."""
    if form is None or form.type == "text":
        return None
    if form.json_schema is None:
        if form.type == "json_schema" and form.beside is None:
            raise ApiError(
                400, "response_format json_schema needs json_schema", param="response_format"
            )
        return form.beside or _ANY_OBJECT
    if form.type == "json_object":
        return _ANY_OBJECT
    schema = form.json_schema.json_schema or _ANY_OBJECT
    return closed_objects(schema) if form.json_schema.strict else schema


def _wanted(choice: ToolChoice | str, tools: list[Tool]) -> list[ToolRule]:
    """Return (name, schema) of the tools of which one must be called."""
    if not tools:
        raise ApiError(400, "tool_choice asks for a call, but there are no tools", param="tools")
    chosen = choice.function.name if isinstance(choice, ToolChoice) else None
    rules = [
        (tool.function.name, _arguments(tool))
        for tool in tools
        if chosen in (None, tool.function.name)
    ]
    if not rules:
        raise ApiError(400, f"tool_choice names {chosen!r}, which is none of the tools")
    return rules


def followed(tools: list[Tool]) -> list[ToolRule]:
    """Return (name, schema) of tools that may be called.

    A schema that no grammar follows lets any object pass, unless it was said to be strict.
    """
    found: list[ToolRule] = []
    for tool in tools:
        schema = _arguments(tool)
        try:
            json_grammar(schema)
        except ConfigError:
            if tool.function.strict:
                raise
            schema = _ANY_OBJECT
        found.append((tool.function.name, schema))
    return found


def _arguments(tool: Tool) -> Mapping[str, object]:
    schema = tool.function.parameters or _ANY_OBJECT
    return closed_objects(schema) if tool.function.strict else schema

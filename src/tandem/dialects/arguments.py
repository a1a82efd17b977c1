"""Arguments of calls whose text alone does not say what type they have."""

import ast
import json
import re
from collections.abc import Iterator, Mapping

from tandem.dialects.dialect import Values

Schemas = Mapping[str, Mapping[str, object]]
"""What tools take, by their names."""


def typed(arguments: object, values: Values, schema: Mapping[str, object]) -> object:
    """Return arguments with values of their types, by marks in them or by the tool's schema."""
    if values in ("json", "python") or not isinstance(arguments, dict):
        return arguments
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    return {
        name: _marked(text) if values == "marked" else by_schema(text, known.get(name))
        for name, text in arguments.items()
        if isinstance(text, str)
    }


def by_schema(text: str, schema: object) -> object:
    """Return what a text means where a schema is expected: itself, unless it may be no string."""
    value = _json(text)
    if not isinstance(schema, dict):
        return value
    choices = schema.get("enum")
    if isinstance(choices, list):
        return text if text in choices else value
    types = set(_types(schema))
    if not types:
        return value
    if "string" in types and (isinstance(value, str) or _type(value) not in types):
        return text
    if _type(value) == "string" and isinstance(lowered := _json(text.lower()), bool | None):
        return lowered  # as Python writes them: True, None
    return value


def _marked(text: str) -> object:
    """Read a value behind the rest of its tag: string="true"> or string="false">."""
    mark, _, value = text.partition('">')
    return value if mark == "true" else _json(value)


def _json(text: str) -> object:
    """Return the value that a text writes; the text itself, if it is no JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(constant: str) -> None:
    """Take NaN and the like, which no JSON has, as text."""
    raise ValueError(constant)


def _types(schema: Mapping[str, object]) -> Iterator[str]:
    """Yield the types that a schema names, in its alternatives too."""
    named = schema.get("type")
    yield from [named] if isinstance(named, str) else filter(_is_text, _list(named))
    for key in ("anyOf", "oneOf"):
        for one in _list(schema.get(key)):
            if isinstance(one, dict):
                yield from _types(one)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _list(value: object) -> list[str]:
    return value if isinstance(value, list) else []


def _type(value: object) -> str:
    """Return the name that JSON Schema has for a value's type; integers are numbers too."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def python_calls(text: str) -> list[dict[str, object]]:
    """Return calls as Python writes them, [f(a=1), g()]; raises `ValueError` for what is none."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("the calls are not Python") from error
    return [_call(node) for node in (tree.elts if isinstance(tree, ast.List) else [tree])]


def _call(node: ast.expr) -> dict[str, object]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("there is something that is no call with named arguments")
    name = ast.unparse(node.func)
    if not re.fullmatch(r"[\w.]+", name):
        raise ValueError("a call has no plain name")
    arguments = {word.arg: _value(word.value) for word in node.keywords if word.arg is not None}
    return {"name": name, "arguments": arguments}


def _value(node: ast.expr) -> object:
    """Return the value of a literal; JSON's own names are values too."""
    names = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(_value(key)): _value(value) for key, value in pairs if key is not None}
    return ast.literal_eval(node)

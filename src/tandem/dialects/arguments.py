"""Parses the text of a tool call: its name, and its arguments with their types."""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

Schemas = Mapping[str, Mapping[str, object]]
"""The schemas of tools' arguments, by tool name."""
NAMESPACE = "]<]minimax[>["
"""Precedes each tag of MiniMax M3, to keep tags distinct from text."""
_TAG = re.compile(re.escape(NAMESPACE) + r"<(/?)([^<>]+)>")
_SPACE = re.compile(r"[\s,]*")


class Argument(NamedTuple):
    """One argument of a tool call, as the model wrote it."""

    key: str
    text: str
    kind: str | None
    """The type that the argument's tag states; None: the tool's schema decides the type."""
    end: int
    """The offset in the text at which the argument ends."""


def tagged(text: str, tag: "re.Pattern[str]", first: int = 0) -> Iterator[Argument]:
    """Yield a text's complete arguments from position `first` on; `tag` matches one argument."""
    for match in tag.finditer(text, first):
        groups = match.groupdict()
        yield Argument(groups["key"], groups["value"], groups.get("type"), match.end())


def nested(text: str, first: int = 0) -> Iterator[Argument]:
    """Yield the complete outermost elements in a text of nested tags, from position `first` on."""
    opened, depth = None, 0
    for match in _TAG.finditer(text, first):
        is_end, name = bool(match[1]), match[2]
        if opened is None:
            opened = None if is_end else match
        elif name == opened[2]:
            depth += -1 if is_end else 1
            if depth < 0:
                yield Argument(name, text[opened.end() : match.start()], None, match.end())
                opened, depth = None, 0


def value_of(argument: Argument, schema: Mapping[str, object]) -> object:
    """Return an argument's value, typed by its tag or, if that names no type, by the schema."""
    if argument.kind is not None:
        is_text = argument.kind in ("true", "string")
        return argument.text if is_text else json_value(argument.text)
    properties = schema.get("properties")
    known = properties.get(argument.key) if isinstance(properties, dict) else None
    return _nested_value(argument.text, known)


def _nested_value(text: str, schema: object) -> object:
    """Return a text's value under a schema; a text with nested elements is a list or an object."""
    elements = list(nested(text)) if NAMESPACE in text else []
    types = set(type_names(schema)) if isinstance(schema, dict) else set()
    if not elements:
        empty: dict[str, object] = {"array": [], "object": {}}
        kind = next(iter(types), "") if len(types) == 1 and not text.strip() else ""
        return empty.get(kind, by_schema(text, schema))
    of: Mapping[str, object] = schema if isinstance(schema, dict) else {}
    if "array" in types or ("object" not in types and {one.key for one in elements} == {"item"}):
        return [_nested_value(one.text, of.get("items")) for one in elements]
    return {one.key: value_of(one, of) for one in elements}


def by_schema(text: str, schema: object) -> object:
    """Return an argument's value under its schema: the text itself, or the JSON value in it.

    A text that `enum` lists stays text. If the schema allows strings, JSON is parsed only if its
    type is another type that the schema names. In all other cases any JSON is parsed, and if the
    schema names types, so are Python's True, False and None.
    """
    value = json_value(text)
    if not isinstance(schema, dict):
        return value
    choices = schema.get("enum")
    if isinstance(choices, list):
        return text if text in choices else value
    types = set(type_names(schema))
    if not types:
        return value
    if "number" in types:
        types.add("integer")
    if "string" in types and (isinstance(value, str) or _type(value) not in types):
        return text
    if _type(value) == "string" and isinstance(lowered := json_value(text.lower()), bool | None):
        return lowered  # as Python writes them: True, None
    return value


def json_value(text: str) -> object:
    """Parse a JSON value; returns the text itself if it is not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(constant: str) -> None:
    """Raise `ValueError` for NaN and infinities, so that they stay text: they are not JSON."""
    raise ValueError(constant)


def type_names(schema: Mapping[str, object]) -> Iterator[str]:
    """Yield the types that a schema names, also in its `anyOf` and `oneOf`."""
    named = schema.get("type")
    names = [named] if isinstance(named, str) else _list(named)
    yield from (name for name in names if isinstance(name, str))
    for key in ("anyOf", "oneOf"):
        for one in _list(schema.get(key)):
            if isinstance(one, dict):
                yield from type_names(one)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _type(value: object) -> str:
    """Return JSON Schema's name for a value's type: "integer" for an int, "number" for a float."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def json_values(text: str) -> list[object]:
    """Return the JSON values in a text, one after the other; lists are replaced by their members.

    Raises `ValueError` if the text is not JSON or has no values.
    """
    found: list[object] = []
    decoder, place = json.JSONDecoder(parse_constant=_refuse), 0
    while (place := _end_of_space(text, place)) < len(text):
        value, place = decoder.raw_decode(text, place)
        found += value if isinstance(value, list) else [value]
    if not found:
        raise ValueError("there is nothing")
    return found


def _end_of_space(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return place if match is None else match.end()


def python_calls(text: str) -> list[dict[str, object]]:
    """Return the name and the arguments of each call in a Python list such as [f(a=1), g()].

    A single call without the list is accepted too. Raises `ValueError` for any other text.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("the calls are not Python") from error
    return [_call(node) for node in (tree.elts if isinstance(tree, ast.List) else [tree])]


def _call(node: ast.expr) -> dict[str, object]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("something is not a call with named arguments")
    name = ast.unparse(node.func)
    if not re.fullmatch(r"[\w.]+", name):
        raise ValueError("a call has no plain name")
    arguments = {word.arg: _value(word.value) for word in node.keywords if word.arg is not None}
    return {"name": name, "arguments": arguments}


def _value(node: ast.expr) -> object:
    """Return the value of a Python literal; JSON's names (true, null) are accepted."""
    names = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(_value(key)): _value(value) for key, value in pairs if key is not None}
    return ast.literal_eval(node)

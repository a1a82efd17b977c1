"""Request bodies: checked against their schemas, with errors in the server's own words.

A null means that the field is absent. Unknown fields are ignored, and their names are reported to
the caller; a strict server refuses unknown fields.

Parsing and checking JSON blocks all other Python code, so its cost is bounded: a body's values are
counted before it is parsed, and a list is checked up to its first wrong element.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, from_json

from tandem.apis.errors import ApiError
from tandem.core.registry import nearest_names

_SENTENCE = "tandem_sentence"
_SHOWN = 64  # characters of a name or value that a message shows
_MOST_NAMED = 16  # ignored fields that are named, for one body
# At each bound, parsing and checking take 50 to 70 ms. A conversation of 4,096 messages has 40,000
# strings, lists and objects; numbers are token ids.
_MOST_VALUES = 100_000
_MOST_NUMBERS = 1_000_000
# What each of pydantic's errors expected; "{...}" comes from the error's context.
_EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "none_required": "null",
    "union_tag_invalid": "a type of {expected_tags}",
    "union_tag_not_found": "an object with a type",
    "literal_error": "{expected}",
    "finite_number": "a finite number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "too_short": "a list of at least {min_length}",
    "too_long": "at most {max_length} of them",
    "string_too_short": "a string of at least {min_length} characters",
    "string_too_long": "a string of at most {max_length} characters",
    "string_pattern_mismatch": "a string like {pattern}",
}
_KINDS = {dict: "an object", str: "a long string"}


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field that Tandem does not follow: accepted `neutral` values, and advice for all others."""

    neutral: tuple[object, ...]
    advice: str


@dataclass(slots=True)
class _Reading:
    """The settings for reading a body, and the names of ignored fields."""

    is_strict: bool
    ignored: set[str] = field(default_factory=set)


def _fail_fast(schema: Any) -> None:
    """Change a schema so that lists are checked only up to their first wrong element.

    A body of 4 MB may have a million wrong elements, each with several errors.
    """
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class Body(BaseModel):
    """The base of all request bodies and of the objects in them."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)
    unsupported: ClassVar[Mapping[str, Unsupported]] = {}

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _without_foreign_fields(cls, data: object, info: ValidationInfo) -> object:
        if not isinstance(data, dict):
            return data
        fields = {name: value for name, value in data.items() if value is not None}
        for name, rule in cls.unsupported.items():
            if (value := fields.pop(name, None)) is not None and value not in rule.neutral:
                raise sentence(f"{name} is not supported; {rule.advice}", name)
        reading = info.context
        if not isinstance(reading, _Reading) or reading.is_strict:
            return fields
        known = known_names(cls)
        for name in sorted(fields.keys() - known)[:_MOST_NAMED]:
            reading.ignored.add(name[:_SHOWN])
        return {name: value for name, value in fields.items() if name in known}


B = TypeVar("B", bound=Body)


@dataclass(frozen=True, slots=True)
class ReadBody(Generic[B]):
    """A checked body, and the names of fields that were ignored."""

    body: B
    ignored: Collection[str]


def sentence(text: str, field: str | None = None) -> PydanticCustomError:
    """Return a validation error with `text` as its message; `field` names the wrong field."""
    return PydanticCustomError(_SENTENCE, "{text}", {"text": text, "field": field})


def note_ignored(info: ValidationInfo, what: str) -> bool:
    """Record `what` as an ignored part of a body, and return True.

    Returns False if the server is strict; the caller must then refuse the part.
    """
    reading = info.context
    if not isinstance(reading, _Reading) or reading.is_strict:
        return False
    if len(reading.ignored) < _MOST_NAMED:
        reading.ignored.add(what[:_SHOWN])
    return True


def tools_of_kind(own: Collection[str], tools: object, info: ValidationInfo) -> object:
    """Return `tools` without those that only the API's vendor can run.

    `own` has the types of the tools to keep; tools without a type are kept, too. On a strict
    server, all tools are kept, and the field's own validation refuses those of other types. A value
    that is not a list is returned as it is, for validation to refuse.
    """
    if not isinstance(tools, list):
        return tools
    kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in tools]
    return [
        tool
        for tool, kind in zip(tools, kinds, strict=True)
        if not isinstance(kind, str)
        or kind in own
        or not note_ignored(info, f"tools of type {kind}")
    ]


def known_names(kind: type[BaseModel]) -> set[str]:
    """Return the field names of a body as clients write them."""
    return {field.alias or name for name, field in kind.model_fields.items()}


def _require_few_values(raw: bytes) -> None:
    """Raise `ApiError` for JSON with too many values, which are counted without parsing."""
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_values = unescaped.count(b'"') // 2
    num_commas = 0
    if num_values <= _MOST_VALUES:
        outside = b"".join(unescaped.split(b'"')[::2])  # the text outside of strings
        num_values += outside.count(b"[") + outside.count(b"{")
        num_commas = outside.count(b",")
    for number, most, what in (
        (num_values, _MOST_VALUES, "strings, lists and objects"),
        (num_commas, _MOST_NUMBERS, "numbers"),
    ):
        if number > most:
            raise ApiError(400, f"the body has more than {most} {what}; send less at a time")


def read_body(kind: type[B], raw: bytes, *, is_strict: bool) -> ReadBody[B]:
    """Return the checked body; raises an `ApiError` that names the first wrong field."""
    _require_few_values(raw)
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    reading = _Reading(is_strict)
    try:
        body = kind.model_validate(data, context=reading)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        raise _in_words(details, data, sorted(known_names(kind))) from None
    return ReadBody(body, reading.ignored)


@dataclass(frozen=True, slots=True)
class _Problem:
    """One of pydantic's errors, with the path and the value of the wrong part of the body."""

    path: tuple[str | int, ...]
    value: object
    detail: ErrorDetails

    @property
    def name(self) -> str:
        return ".".join(str(part)[:_SHOWN] for part in self.path)[:200]


def _in_words(details: Sequence[ErrorDetails], data: object, known: list[str]) -> ApiError:
    """Return an `ApiError` in words about the first wrong field in pydantic's errors `details`.

    `known` has the body's field names, from which it suggests one for an unknown field.
    """
    problems = [_located(detail, data) for detail in details]
    first = problems[0].path[:1]
    # A value that may be of several types has an error for each. The deepest error belongs to the
    # type that the client meant.
    own = [problem for problem in problems if problem.path[:1] == first]
    depth = max(len(problem.path) for problem in own)
    own = [problem for problem in own if len(problem.path) == depth]
    problem = own[0]
    kind, name = problem.detail["type"], problem.name
    if kind == _SENTENCE:
        about = [part for part in (name, problem.detail["ctx"]["field"]) if part]
        return ApiError(400, problem.detail["msg"], param=".".join(about) or None)
    if kind == "extra_forbidden":
        field_name = str(problem.path[-1])[:_SHOWN]
        hint = f"; {nearest_names(field_name, known)}" if depth == 1 else ""
        message = f"unknown field {field_name!r}{hint}"
        return ApiError(400, message, param=name, code="unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{name} is missing", param=name)
    expected = " or ".join(dict.fromkeys(_expected(one.detail) for one in own))
    where = name or "the body"
    return ApiError(
        400,
        f"{where} is {_shown(problem.value)}; expected {expected}",
        param=name or None,
        reason=f"{where} is not {expected}",
    )


def _located(detail: ErrorDetails, data: Any) -> _Problem:
    """Return an error with its path in the body, without the names that pydantic adds to paths."""
    path: list[str | int] = []
    is_missing = detail["type"] == "missing"
    for i, part in enumerate(detail["loc"]):
        is_there = (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        )
        if is_there:
            data = data[part]
        elif not (is_missing and i == len(detail["loc"]) - 1):
            continue
        path.append(part)
    return _Problem(tuple(path), data, detail)


def _expected(detail: ErrorDetails) -> str:
    expected = _EXPECTED.get(detail["type"])
    if expected is None:
        return detail["msg"].removeprefix("Input should be ")
    return expected.format(**detail.get("ctx", {}))


def _shown(value: object) -> str:
    """Return a value as text for an error message; for a long value, only its type."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**64):
        return repr(value)
    if isinstance(value, str) and len(value) <= _SHOWN:
        return repr(value)
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return next((word for kind, word in _KINDS.items() if isinstance(value, kind)), "a number")

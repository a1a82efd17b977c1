"""Reads a model's JSON files; refuses excessive size or depth and contradictory duplicate keys.

Code that walks the result therefore never meets nesting too deep for Python's recursion, or text
that cannot be encoded.
"""

import json
from pathlib import Path
from typing import Any, TypeGuard

from tandem.core.errors import ModelError

JsonObject = dict[str, Any]

_MOST_BYTES = 256 << 20  # the largest published tokenizer.json has 35 MB
_DEEPEST = 32  # configs of Transformers nest 5 deep, tokenizers 8
_LONGEST_SHOWN = 80
_MOST_SHOWN = 1000


class DamagedJsonError(Exception):
    """JSON text that is not accepted; the message is a clause that says why."""


def read_json(directory: Path, name: str) -> JsonObject:
    """Return the JSON object in a directory's file; `ModelError` if there is no valid object."""
    file = directory / name
    if not file.is_file():
        if file.exists():
            raise ModelError(f"{file} is not a file; expected a JSON object")
        raise ModelError(f"{directory} has no {name}; expected a Transformers checkpoint")
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise DamagedJsonError(f"it has more than {_MOST_BYTES} bytes")
        content = parse_json(file.read_bytes())
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror})") from error
    except DamagedJsonError as error:
        raise ModelError(f"{file} is not valid JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a {type(content).__name__}, expected a JSON object")
    return content


def parse_json(text: bytes) -> Any:
    """Parse a JSON text; raises `DamagedJsonError` if it is invalid or nested too deep.

    A key with two different values is an error: two readers could each use a different one.
    """
    try:
        content = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise DamagedJsonError(f"it is nested more than {_DEEPEST} deep") from None
    except ValueError as error:
        raise DamagedJsonError(str(error)) from None
    _require_sane(content)
    return content


def shown(value: object) -> str:
    """Return a value as text for an error message, cut after 80 characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value) if _is_short(value) else f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is an integer; booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_short(value: object) -> bool:
    """Whether `repr` of a value takes little time."""
    if is_int(value):
        return value.bit_length() < 1024
    return not isinstance(value, str | list | tuple | dict) or len(value) < _MOST_SHOWN


def _unique(pairs: list[tuple[str, object]]) -> JsonObject:
    found: JsonObject = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(f"it names {key} twice, as {shown(found[key])} and as {shown(value)}")
        found[key] = value
    return found


def _require_sane(content: object) -> None:
    """Raise `DamagedJsonError` for nesting that is too deep and texts with unpaired surrogates.

    The walk goes level by level, without recursion.
    """
    level: list[object] = [content]
    for _ in range(_DEEPEST + 1):
        inner: list[object] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.keys()
                inner += value.values()
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, str) and not value.isascii():
                _require_encodable(value)
        if not inner:
            return
        level = inner
    raise DamagedJsonError(f"it is nested more than {_DEEPEST} deep")


def _require_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DamagedJsonError(f"{ascii(text)[:_LONGEST_SHOWN]} is not text") from None

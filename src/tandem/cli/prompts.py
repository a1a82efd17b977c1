"""Reads prompts from a file: text with one prompt per line, JSON, or JSON lines."""

import json
from pathlib import Path
from typing import Any

from tandem.core.errors import FileFormatError

_EXPECTED = 'one prompt per line, or JSON: a list of texts, or {"prompts": [...]} of them'


def read_prompts(path: str | Path) -> list[str]:
    """Return the prompts of a file; raises `FileFormatError` if it is missing, invalid or empty."""
    source = Path(path)
    if not source.is_file():
        raise FileFormatError(f"{source}: found no such file; expected {_EXPECTED}")
    try:
        text = source.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileFormatError(
            f"{source}: byte {error.start} is not UTF-8; convert it, for instance with iconv"
        ) from None
    if source.suffix == ".json":
        prompts = _from_json(text, source)
    elif source.suffix == ".jsonl":
        prompts = [_text(_parse(line, source), source) for line in text.splitlines() if line]
    else:
        prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise FileFormatError(f"{source}: found no prompt; expected {_EXPECTED}")
    return prompts


def _from_json(text: str, source: Path) -> list[str]:
    values = _parse(text, source)
    if isinstance(values, dict):
        values = values.get("prompts")
    if not isinstance(values, list):
        raise FileFormatError(f"{source}: found {type(values).__name__}; expected {_EXPECTED}")
    return [_text(value, source) for value in values]


def _parse(text: str, source: Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise FileFormatError(f"{source}: not JSON ({error}); expected {_EXPECTED}") from None


def _text(value: object, source: Path) -> str:
    if isinstance(value, dict):
        value = next((value[key] for key in ("text", "prompt", "question") if key in value), value)
    if not isinstance(value, str):
        raise FileFormatError(f"{source}: found the prompt {value!r:.60}; expected a text")
    return value

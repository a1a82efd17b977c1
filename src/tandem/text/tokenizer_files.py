"""Checks a tokenizer's files before Transformers reads them: types, code, and text growth.

Growth multiplies along a chain of replacements in tokenizer.json: thirty replacements can turn one
letter into gigabytes. The file tells the growth of each step, and the product over all steps bounds
the growth of a text.
"""

import base64
import binascii
from collections.abc import Iterator
from pathlib import Path

from tandem.checkpoint.foreign_code import require_no_foreign_code
from tandem.checkpoint.json_files import JsonObject, read_json, shown
from tandem.core.errors import ModelError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_FILES = (
    TOKENIZER_FILE, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json",
    "processor_config.json", "preprocessor_config.json",
)  # fmt: skip
_STEPS_IN = ("normalizers", "decoders", "pretokenizers", "processors")
# Growth in published tokenizers: 2 for a replacement, up to 33 for SentencePiece's character table.
_MOST_GROWTH = 500
_MOST_STEPS = 100
_MOST_ADDED = 1000  # tokens added around a text
_LONGEST_AFFIX = 64  # characters
_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")


def require_possible_tokenizer(directory: Path) -> None:
    """Raise `ModelError` for tokenizer files with unexpected content.

    Missing files are no error.
    """
    found = {name: read_json(directory, name) for name in _FILES if (directory / name).exists()}
    for name, content in found.items():
        require_no_foreign_code(directory / name, content)
    _require_config(directory / TOKENIZER_CONFIG, found.get(TOKENIZER_CONFIG, {}))
    _require_growth(directory / TOKENIZER_FILE, found.get(TOKENIZER_FILE, {}))


def _require_config(file: Path, config: JsonObject) -> None:
    """Raise `ModelError` if a value in tokenizer_config.json has an unexpected type.

    Only keys are checked that Tandem and Transformers read without a check of their own.
    """
    for key, kinds, expected in (
        ("tokenizer_class", (str, type(None)), "a name"),
        ("chat_template", (str, list, dict, type(None)), "a text or several"),
        ("added_tokens_decoder", (dict, type(None)), "an object"),
        ("auto_map", (dict, list, type(None)), "an object"),
        ("model_max_length", (int, float, type(None)), "a number"),
    ):
        if not isinstance(config.get(key), kinds):
            raise ModelError(f"{file}: {key} is {shown(config.get(key))}, expected {expected}")


def _require_growth(file: Path, content: JsonObject) -> None:
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        growth = 1.0
        for number, step in enumerate(_steps(content.get(name))):
            growth *= _growth(step)
            if number >= _MOST_STEPS:
                raise ModelError(f"{file}: its {name} has more than {_MOST_STEPS} steps")
            if growth > _MOST_GROWTH:
                raise ModelError(
                    f"{file}: its {name} may make a text more than {_MOST_GROWTH} times as long; "
                    "no published tokenizer does: download it again"
                )
    for step in _steps(content.get("post_processor")):
        _require_template(file, step)
    model = content.get("model")
    for key in _AFFIXES:
        affix = model.get(key) if isinstance(model, dict) else None
        if isinstance(affix, str) and len(affix) > _LONGEST_AFFIX:
            raise ModelError(f"{file}: {key} is {shown(affix)}, longer than {_LONGEST_AFFIX}")


def _steps(part: object) -> Iterator[JsonObject]:
    """Yield the steps of a normalizer, decoder or similar; sequences are flattened."""
    left = [part]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            yield one
            for name in _STEPS_IN:
                inner = one.get(name)
                left += inner if isinstance(inner, list) else []


def _growth(step: JsonObject) -> float:
    """Return the most characters that a step makes of one character; 1 for unknown steps."""
    match step:
        case {"type": "Replace", "content": str(content), "pattern": {"String": str(found)}}:
            return max(1.0, len(content) / len(found)) if found else len(content) + 1.0
        case {"type": "Replace", "content": str(content)}:
            return len(content) + 1.0  # a regular expression may match the empty string
        case {"type": "Prepend", "prepend": str(content)}:
            return len(content) + 1.0
        case {"type": "Precompiled", "precompiled_charsmap": str(charsmap)}:
            return float(_longest_replacement(charsmap))
    return 1.0


def _longest_replacement(charsmap: str) -> int:
    """Return the length in bytes of the longest text in SentencePiece's character table.

    `charsmap` is the table in base64: a trie, then the texts. Returns 1 if it is not base64.
    """
    try:
        table = base64.b64decode(charsmap)
    except (binascii.Error, ValueError):
        return 1  # the tokenizers package will refuse it
    begin = 4 + int.from_bytes(table[:4], "little")
    return max(1, max(map(len, table[begin:].split(b"\0"))))


def _require_template(file: Path, step: JsonObject) -> None:
    """Raise `ModelError` for a template of more than two texts or `_MOST_ADDED` added tokens."""
    tokens = step.get("special_tokens")
    lengths = {
        name: len(ids)
        for name, token in (tokens.items() if isinstance(tokens, dict) else ())
        if isinstance(token, dict) and isinstance(ids := token.get("ids"), list)
    }
    for name in ("single", "pair"):
        template = step.get(name)
        pieces: list[object] = template if isinstance(template, list) else []
        kinds = [piece for piece in pieces if isinstance(piece, dict)]
        texts = sum("Sequence" in piece for piece in kinds)
        added = sum(
            lengths.get(str(token.get("id")), 1)
            for piece in kinds
            if isinstance(token := piece.get("SpecialToken"), dict)
        )
        if texts > 2 or added > _MOST_ADDED:
            raise ModelError(
                f"{file}: its post_processor puts {texts} texts and {added} tokens into one "
                f"({name}), expected at most 2 and {_MOST_ADDED}: download it again"
            )

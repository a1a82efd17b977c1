"""Refuses a dense model from its config and the names of its tensors, before torch is loaded.

Says nothing of what it is not sure of: the checks of loading are the careful ones.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from tandem.core.errors import UnsupportedModelError

_CONFIG = "config.json"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_LENGTH_BYTES = 8  # of the header, at the beginning of a safetensors file
_LONGEST_HEADER = 100 << 20  # safetensors' own limit


def refuse_dense(directory: Path) -> None:
    """Raise `UnsupportedModelError` for a directory whose model has no experts."""
    try:
        config = json.loads((directory / _CONFIG).read_text(encoding="utf-8"))
        names = _tensor_names(directory)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return
    if not isinstance(config, dict) or not names or "auto_map" in config:
        return
    if _counts_experts(config) or any("expert" in name or "moe" in name for name in names):
        return
    raise UnsupportedModelError(
        f"{directory} holds a dense model ({config.get('model_type')}): it has no experts that "
        "Tandem could offload; load it with Transformers alone"
    )


def _counts_experts(config: Mapping[str, object]) -> bool:
    """Tell whether a config, or one inside it, names a number of experts above one."""
    return any(
        _counts_experts(value)
        if isinstance(value, dict)
        else "expert" in key and isinstance(value, int) and value > 1
        for key, value in config.items()
    )


def _tensor_names(directory: Path) -> set[str]:
    index = directory / _INDEX
    if index.exists():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    return set(_header_names(directory / _SINGLE))


def _header_names(file: Path) -> Iterator[str]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        if length <= _LONGEST_HEADER:
            yield from json.loads(opened.read(length))

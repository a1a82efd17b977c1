"""Refuses a dense model from its config and the names of its tensors, before torch is loaded.

Says nothing of what it is not sure of: the checks of loading are the careful ones.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from tandem.checkpoint.json_files import read_json
from tandem.checkpoint.sources.safetensors_header import read_header
from tandem.core.errors import ModelError, UnsupportedModelError

_CONFIG = "config.json"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def refuse_dense(directory: Path) -> None:
    """Raise `UnsupportedModelError` for a directory whose model has no experts."""
    try:
        config, names = read_json(directory, _CONFIG), _tensor_names(directory)
    except (OSError, ModelError):
        return
    if not names or "auto_map" in config:
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


def _tensor_names(directory: Path) -> Collection[str]:
    if (directory / _INDEX).exists():
        weight_map = read_json(directory, _INDEX).get("weight_map")
        return weight_map if isinstance(weight_map, dict) else ()
    return read_header(directory / _SINGLE)

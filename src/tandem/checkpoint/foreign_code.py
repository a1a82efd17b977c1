"""Finds values in a model's JSON files that would make Transformers run or fetch foreign code.

A config may name kernels of the hub, other weight files or other models. Tandem loads only files
in the model's directory and runs only installed code, or the model's own code if the user sets
`trust_remote_code`.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from tandem.checkpoint.json_files import JsonObject, shown
from tandem.core.errors import ModelError, UnsupportedModelError

# Keys that choose the functions for attention or experts. A kernel of the hub is named OWNER/NAME.
_IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?")
_KERNEL = re.compile(r"[/:@|]")
# Key -> what Transformers would do if it had a value.
_REFUSED = {
    "transformers_weights": "load weights that are not checked",
    "configuration_files": "read another config",
    "distributed_config": "spread the model over processes",
    "use_kernels": "run kernels of the hub",
    "kernel_config": "run kernels of the hub",
    "custom_generate": "run code of the model",
    "use_pretrained_backbone": "fetch another model",
    "backbone": "fetch another model",
    "audio_tokenizer": "fetch another model",
    "audio_tokenizer_name_or_path": "fetch another model",
    "gguf_file": "read another file",
}
_TIMM_HUB = re.compile(r"(hf[-_]hub|local-dir|https?):")


def require_no_foreign_code(file: Path, content: JsonObject) -> None:
    """Raise if a file names code, kernels or models that Tandem must not fetch or run.

    Raises `UnsupportedModelError` for kernels of the hub, and `ModelError` for anything else.
    """
    for key, value in _named_values(content):
        if _IMPLEMENTATION.fullmatch(key):
            _require_local_implementation(file, key, value)
        elif key in _REFUSED and value:
            raise ModelError(
                f"{file} has {key} {shown(value)}, with which Transformers would {_REFUSED[key]}; "
                "remove that line"
            )
        elif key == "architecture" and isinstance(value, str) and _TIMM_HUB.match(value):
            raise ModelError(
                f"{file} has {key} {shown(value)}, with which Transformers would fetch another "
                "model; remove that line"
            )


def require_no_methods(file: Path, config: JsonObject, kind: type) -> None:
    """Raise `ModelError` for config keys that would replace methods of the config class `kind`."""
    for part in (config, *(v for k, v in config.items() if k.endswith("_config"))):
        for key in part if isinstance(part, dict) else ():
            if key.startswith("__") or callable(getattr(kind, key, None)):
                raise ModelError(
                    f"{file} has a key {shown(key)}, which is a method of Transformers' configs; "
                    "download it again"
                )


def _require_local_implementation(file: Path, key: str, value: object) -> None:
    names = value.values() if isinstance(value, dict) else (value,)
    for name in names:
        if name is not None and not isinstance(name, str):
            raise ModelError(f"{file} has {key} {shown(value)}, expected the name of a function")
        if name is not None and _KERNEL.search(name):
            raise UnsupportedModelError(
                f"{file} has {key} {shown(name)}, a kernel that Transformers would fetch from the "
                "hub and run; Tandem runs none: remove that line"
            )


def _named_values(content: object) -> Iterator[tuple[str, object]]:
    """Yield each (key, value) of a JSON value and of all objects nested in it."""
    left = [content]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            yield from one.items()
            left += one.values()
        elif isinstance(one, list):
            left += one

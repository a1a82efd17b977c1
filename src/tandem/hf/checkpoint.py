"""Checks a checkpoint directory before anything is loaded: one sentence instead of a traceback.

Reads config.json and the headers of the safetensors files, never the weights.
"""

import json
from pathlib import Path
from typing import Any

from tandem.core.errors import ModelError, UnsupportedModelError
from tandem.core.registry import nearest_names
from tandem.hf.config import QUANT_METHOD
from tandem.hf.packed import INDEX_FILE

_INDEX_FILES = (INDEX_FILE, "model.safetensors.index.json")
_SINGLE_FILE = "model.safetensors"
_HEADER_LENGTH_BYTES = 8


def check_checkpoint(directory: Path) -> dict[str, Any]:
    """Return config.json of a directory whose files are all there and whole.

    Raises `ModelError` naming the first file that is missing, truncated or damaged, and
    `UnsupportedModelError` for sources that Tandem does not read.
    """
    config = _read_json(directory, "config.json")
    _check_model_type(directory, config)
    _check_quantization(directory, config)
    for index_name in _INDEX_FILES:
        if (directory / index_name).exists():
            _check_shards(directory, index_name)
            return config
    if (directory / _SINGLE_FILE).exists():
        read_header(directory / _SINGLE_FILE)
        return config
    raise ModelError(
        f"{directory} has no weights: expected {_SINGLE_FILE} or {_INDEX_FILES[1]}; "
        "is the download complete?"
    )


def read_header(file: Path) -> dict[str, Any]:
    """Return the tensors that a safetensors file announces; its size must agree with them."""
    size = file.stat().st_size
    damaged = f"{file} is damaged (its safetensors header cannot be read); download it again"
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")
        if size < _HEADER_LENGTH_BYTES or length > size - _HEADER_LENGTH_BYTES:
            raise ModelError(damaged)
        try:
            header = json.loads(stream.read(length))
            tensors = {k: v for k, v in header.items() if k != "__metadata__"}
            data_bytes = max((t["data_offsets"][1] for t in tensors.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(damaged) from None
    expected = _HEADER_LENGTH_BYTES + length + data_bytes
    if size != expected:
        raise ModelError(f"{file} has {size} bytes, expected {expected}; download it again")
    return tensors


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    file = directory / name
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{directory} has no {name}; expected a Transformers checkpoint") from None
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a {type(content).__name__}, expected a JSON object")
    return content


def _check_model_type(directory: Path, config: dict[str, Any]) -> None:
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    if model_type is None:
        raise ModelError(f"{directory}/config.json has no model_type; is this a model directory?")
    if model_type not in CONFIG_MAPPING:
        hint = nearest_names(str(model_type), list(CONFIG_MAPPING.keys()))
        hint = hint if hint.startswith("did") else "a newer Transformers may have it"
        raise UnsupportedModelError(
            f"{directory}/config.json names model_type {model_type!r}, which the installed "
            f"Transformers does not know; {hint}"
        )


def _check_quantization(directory: Path, config: dict[str, Any]) -> None:
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method not in (None, QUANT_METHOD):
        raise UnsupportedModelError(
            f"{directory} is quantized with {method!r}; this version of Tandem reads bf16, fp16 "
            "and fp32 checkpoints and its own packed ones, so use the unquantized original"
        )


def _check_shards(directory: Path, index_name: str) -> None:
    weight_map = _read_json(directory, index_name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{directory / index_name} has no weight_map; download it again")
    headers: dict[str, dict[str, Any]] = {}
    for tensor, shard in weight_map.items():
        if shard not in headers:
            if not (directory / shard).exists():
                raise ModelError(
                    f"{directory} lacks {shard}, which {index_name} names; download it"
                )
            headers[shard] = read_header(directory / shard)
        if tensor not in headers[shard]:
            raise ModelError(f"{directory / shard} lacks tensor {tensor}, which {index_name} names")

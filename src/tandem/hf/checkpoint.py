"""Checks a model's files before anything is loaded: one sentence instead of a traceback.

Reads config.json and the headers of the safetensors files, never the weights.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformers import PreTrainedConfig

from tandem.checkpoint.config_sizes import HeldTensors, require_sizes
from tandem.checkpoint.config_values import (
    require_generation_config,
    require_possible_values,
    require_readable_config,
)
from tandem.checkpoint.foreign_code import require_no_foreign_code, require_no_methods
from tandem.checkpoint.hub import is_gguf
from tandem.checkpoint.json_files import JsonObject, read_json, shown
from tandem.checkpoint.packed import INDEX_FILE
from tandem.checkpoint.sources.files import TensorFiles, open_tensors
from tandem.checkpoint.sources.gguf_header import parts_of
from tandem.core.errors import ModelError, UnsupportedModelError
from tandem.core.registry import nearest_names
from tandem.hf.config import QUANT_METHOD

CONFIG_FILE = "config.json"
_LONGEST_TYPE = 100  # characters


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model directory whose config and tensor headers `open_checkpoint` has checked."""

    directory: Path
    config: JsonObject
    files: TensorFiles
    may_run_code: bool = False
    """Whether the user allows code that comes with the model to run."""

    @property
    def quantization(self) -> JsonObject | None:
        """The `quantization_config` of config.json or its text part; None if it has none."""
        return quantization_of(self.config)

    @property
    def is_packed(self) -> bool:
        """Whether the checkpoint is packed, as Tandem writes it."""
        return (self.quantization or {}).get("quant_method") == QUANT_METHOD

    @property
    def path(self) -> Path:
        """The checkpoint's directory."""
        return self.directory

    @property
    def runs_code(self) -> bool:
        """Whether the model's own code will run: it has some, and the user allows it."""
        return self.may_run_code and "auto_map" in self.config

    @property
    def held(self) -> HeldTensors:
        """Limits, derived from the tensors, on the layers and weights of the config."""
        entries = self.files.entries
        elements = sum(entry.most_elements for entry in entries.values())
        return HeldTensors(entries, len(entries), elements)

    @property
    def weight_files(self) -> list[Path]:
        """The files that hold tensors, sorted by path."""
        return sorted({entry.file for entry in self.files.entries.values()})


@dataclass(frozen=True, slots=True)
class GgufCheckpoint:
    """A model in one GGUF file or in several parts, which are checked only when they are read."""

    path: Path
    is_packed: Literal[False] = False

    @property
    def weight_files(self) -> list[Path]:
        """The files that hold tensors."""
        return parts_of(self.path)


AnyCheckpoint = Checkpoint | GgufCheckpoint


def open_model(path: Path, *, may_run_code: bool = False) -> AnyCheckpoint:
    """Return the checkpoint in a directory or GGUF file; raises as `open_checkpoint` does."""
    return (
        GgufCheckpoint(path) if is_gguf(path) else open_checkpoint(path, may_run_code=may_run_code)
    )


def open_checkpoint(directory: Path, *, may_run_code: bool = False) -> Checkpoint:
    """Check a directory and return its checkpoint.

    Raises `ModelError` naming the first missing, truncated or damaged file, and
    `UnsupportedModelError` for a model type that Transformers does not know, unless `may_run_code`
    allows the model's own code.
    """
    config = read_json(directory, CONFIG_FILE)
    _check_model_type(directory, config, may_run_code=may_run_code)
    runs_code = may_run_code and "auto_map" in config
    where = directory / CONFIG_FILE
    if not runs_code:  # a model's own code may give these names any meaning
        require_no_foreign_code(where, config)
        require_no_methods(where, config, PreTrainedConfig)
        require_possible_values(str(where), config)
    require_generation_config(directory)
    index_name = INDEX_FILE if (directory / INDEX_FILE).exists() else None
    checkpoint = Checkpoint(directory, config, open_tensors(directory, index_name), may_run_code)
    if not runs_code:
        require_sizes(str(where), config, checkpoint.held)
        require_readable_config(directory, str(config["model_type"]))
    return checkpoint


def quantization_of(config: JsonObject) -> JsonObject | None:
    """Return the `quantization_config` of a config.json or its text part; None if it has none."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and isinstance(part.get("quantization_config"), dict):
            found: JsonObject = part["quantization_config"]
            return found
    return None


def _check_model_type(directory: Path, config: JsonObject, *, may_run_code: bool) -> None:
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    if model_type is None:
        raise ModelError(f"{directory}/config.json has no model_type; is this a model directory?")
    if not isinstance(model_type, str) or len(model_type) > _LONGEST_TYPE:
        raise ModelError(
            f"{directory}/config.json: model_type is {shown(model_type)}, expected the name of an "
            "architecture"
        )
    if model_type in CONFIG_MAPPING or ("auto_map" in config and may_run_code):
        return
    if "auto_map" in config:
        raise UnsupportedModelError(
            f"{directory}/config.json names model_type {model_type!r}, which needs the code that "
            "comes with the model; read that code, then load with trust_remote_code=True "
            "(--trust-remote-code)"
        )
    hint = nearest_names(str(model_type), list(CONFIG_MAPPING.keys()))
    hint = hint if hint.startswith("did") else "a newer Transformers may have it"
    raise UnsupportedModelError(
        f"{directory}/config.json names model_type {model_type!r}, which the installed "
        f"Transformers does not know; {hint}"
    )

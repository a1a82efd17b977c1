"""Finds the importance for rounding weights while a model loads.

The options name its file, or say "auto" for the file that `tandem importance` keeps for the model.
"""

import dataclasses
import hashlib
from pathlib import Path

from tandem.checkpoint.importance import Importance, open_importance
from tandem.core.errors import ConfigError
from tandem.experts.store.packed_layer import PackedLayer
from tandem.foreign_types import PreTrainedModel
from tandem.hf.checkpoint import AnyCheckpoint
from tandem.hf.config import OffloadConfig
from tandem.hf.dense import packable_layers
from tandem.hf.runtime import Runtime

AUTO = "auto"


def kept_importance(checkpoint: AnyCheckpoint, cache_path: Path) -> Path:
    """Return the path of the file that keeps the importance of a checkpoint's model."""
    files = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in checkpoint.weight_files]
    parts = repr((str(checkpoint.path.resolve()), files))
    digest = hashlib.sha256(parts.encode()).hexdigest()[:16]
    return cache_path / "importance" / f"{checkpoint.path.stem}-{digest}.safetensors"


def importance_file(path: str | None, checkpoint: AnyCheckpoint, cache_path: Path) -> Path | None:
    """Return the file that an option names, or for "auto" the one kept for the checkpoint's model.

    Returns None if `path`, the option, is None. Raises `ConfigError` if the file does not exist, or
    if the checkpoint is packed.
    """
    if path is None:
        return None
    if checkpoint.is_packed:
        raise ConfigError(
            f"importance is {path!r}, and {checkpoint.path} is packed: its weights are rounded "
            "already; leave it out, or pack the source again with it"
        )
    file = kept_importance(checkpoint, cache_path) if path == AUTO else Path(path)
    if file.is_file():
        return file
    if path == AUTO:
        raise ConfigError(
            f"no importance of {checkpoint.path} has been kept; collect it first: tandem "
            f"importance {checkpoint.path}"
        )
    raise ConfigError(f"importance is {path!r}, which is not a file; give one, or auto")


def with_importance_file(offload: OffloadConfig, checkpoint: AnyCheckpoint) -> OffloadConfig:
    """Return options with importance resolved to a file; raises as `importance_file` does."""
    file = importance_file(offload.importance, checkpoint, offload.cache_path)
    return offload if file is None else dataclasses.replace(offload, importance=str(file))


def given_importance(offload: OffloadConfig) -> Importance | None:
    """Open the importance file of the options; None if they name no file.

    Raises `ConfigError` for "auto", and as `open_importance` does.
    """
    if offload.importance is None:
        return None
    if offload.importance == AUTO:
        raise ConfigError(
            "importance 'auto' is found by tandem.load and the commands alone; name the file"
        )
    return open_importance(Path(offload.importance))


def weigh_by(importance: Importance, model: PreTrainedModel, runtime: Runtime) -> None:
    """Use `importance` for rounding a model's weights; must be called before they are read.

    Raises `ConfigError` if the importance belongs to another model.
    """
    experts = [f"{layer.arrivals.name}.down_proj" for layer in runtime.store]
    linear = [f"{path}.weight" for path, *_ in packable_layers(model)]
    importance.require_some_of([*experts, *linear])
    runtime.importance = importance.of
    for layer in runtime.store:
        if isinstance(layer, PackedLayer):
            layer.importance = importance.of

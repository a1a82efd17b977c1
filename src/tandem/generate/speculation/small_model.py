"""Loads a small model to draft with."""

from pathlib import Path

from tandem.core.errors import UnsupportedModelError
from tandem.foreign_types import PreTrainedModel
from tandem.hf.checkpoint import Checkpoint, open_model
from tandem.hf.config import OffloadConfig
from tandem.hf.dense import pack_as_loaded
from tandem.hf.load import load_checkpoint
from tandem.hf.runtime import require_runtime


def load_small(path: Path) -> PreTrainedModel:
    """Load a model on the CPU, its linear layers packed as they are; raises `TandemError`."""
    checkpoint = open_model(path)
    if not isinstance(checkpoint, Checkpoint):
        raise UnsupportedModelError(
            f"{path} is a GGUF file, and models to draft with are read from safetensors; give a "
            "directory or a hub id"
        )
    model = load_checkpoint(checkpoint, OffloadConfig(threads=1))
    pack_as_loaded(model, require_runtime(model).threads)
    return model

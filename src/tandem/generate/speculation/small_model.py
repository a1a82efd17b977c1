"""Loads a small model to draft with."""

from pathlib import Path

from tandem.foreign_types import PreTrainedModel
from tandem.hf.checkpoint import Checkpoint, open_model
from tandem.hf.config import OffloadConfig
from tandem.hf.dense import pack_as_loaded
from tandem.hf.load import load_checkpoint
from tandem.hf.runtime import require_runtime


def load_small(path: Path) -> PreTrainedModel:
    """Load a model on the CPU, its linear layers packed as they are; raises `TandemError`.

    A GGUF file's keep their codes.
    """
    checkpoint = open_model(path)
    dense_dtype = "none" if isinstance(checkpoint, Checkpoint) else "auto"
    model = load_checkpoint(checkpoint, OffloadConfig(threads=1, dense_dtype=dense_dtype))
    pack_as_loaded(model, require_runtime(model).threads)
    return model

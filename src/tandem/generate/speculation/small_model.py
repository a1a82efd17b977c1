"""Loads a small model for drafting."""

from pathlib import Path

from tandem.foreign_types import PreTrainedModel
from tandem.hf.checkpoint import AnyCheckpoint, Checkpoint, open_model
from tandem.hf.config import OffloadConfig
from tandem.hf.dense import pack_as_loaded
from tandem.hf.load import load_checkpoint
from tandem.hf.runtime import require_runtime


def load_small(path: Path) -> PreTrainedModel:
    """Load a model on the CPU without requantising its linear layers; raises `TandemError`.

    Linear layers of a GGUF file keep their codes.
    """
    checkpoint = open_model(path)
    model = load_checkpoint(checkpoint, small_options(checkpoint))
    pack_as_loaded(model, require_runtime(model).threads)
    return model


def small_options(checkpoint: AnyCheckpoint) -> OffloadConfig:
    """Return the options for loading a draft model; its linear layers are not requantised."""
    dense_dtype = "none" if isinstance(checkpoint, Checkpoint) else "auto"
    return OffloadConfig(threads=1, dense_dtype=dense_dtype)

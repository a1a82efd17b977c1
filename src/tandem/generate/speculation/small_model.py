"""Loads a small model to draft with: dense ones too, which nothing else here loads."""

from pathlib import Path

import transformers

from tandem.checkpoint.config_values import foreign_errors
from tandem.core.errors import UnsupportedModelError
from tandem.foreign_types import PreTrainedModel
from tandem.hf.checkpoint import Checkpoint, open_model
from tandem.hf.config import OffloadConfig
from tandem.hf.dense import pack_as_loaded
from tandem.hf.experts import is_experts_module
from tandem.hf.load import empty_model, load_checkpoint, own_config, source_config
from tandem.kernels.dense import CpuThreads


def load_small(path: Path) -> PreTrainedModel:
    """Load a model on the CPU, its linear layers packed as they are; raises `TandemError`."""
    checkpoint = open_model(path)
    if not isinstance(checkpoint, Checkpoint):
        raise UnsupportedModelError(
            f"{path} is a GGUF file, and models to draft with are read from safetensors; give a "
            "directory or a hub id"
        )
    config = source_config(checkpoint)
    if any(is_experts_module(module) for module in empty_model(config).modules()):
        return load_checkpoint(checkpoint, OffloadConfig())
    with foreign_errors(f"Transformers cannot load {path}"):
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
            path, config=own_config(checkpoint), dtype="auto", local_files_only=True,
            use_safetensors=True,
        )  # fmt: skip
    pack_as_loaded(model, CpuThreads(num_threads=1))
    return model.eval()

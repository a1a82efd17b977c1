"""Tiny models whose linear layers are all packed."""

from pathlib import Path
from typing import Any

import tandem
from tests.hf.tiny import save_tiny_checkpoint


def loaded(folder: Path, name: str, **options: Any) -> Any:
    """A tiny model whose linear layers are all packed: what it writes is the same in any batch."""
    return load_packed(save_tiny_checkpoint(folder / "tiny", name), **options)


def load_packed(directory: Path, **options: Any) -> Any:
    """Load a tiny model with all its linear layers packed, as far as they can be."""
    packed = {"dtype": "bfloat16", "expert_dtype": "int8-g32", "dense_dtype": "int8-g32"}
    model = tandem.load(directory, threads=1, **{**packed, **options})
    model.generation_config.eos_token_id = None
    return model

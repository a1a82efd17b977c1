"""The tiny checkpoint of the server tests."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.hf.tiny import save_tiny_checkpoint

# Long enough for tools in the system message, and for answers that outlast a test.
CONTEXT = 32768
END_ID = 2


def save_served_checkpoint(
    directory: Path, name: str = "qwen3_moe", /, *, context: int = CONTEXT, **values: int
) -> Path:
    """Write a tiny random model that never ends by itself: its end token is never likely.

    `values` override config values.
    """
    save_tiny_checkpoint(directory, name, **values)
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        if "lm_head.weight" in tensors:
            tensors["lm_head.weight"][END_ID] = 0
            save_file(tensors, file, metadata={"format": "pt"})
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["max_position_embeddings"] = context
    path.write_text(json.dumps(config), encoding="utf-8")
    return directory


def never_called(*args: Any, **kwargs: Any) -> Any:
    """Replaces the function that loads a model, where none may be loaded."""
    raise AssertionError("nothing is loaded here")

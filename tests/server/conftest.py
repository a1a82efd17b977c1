"""One server with a tiny random model for all tests that do not end it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

pytest.importorskip("fastapi", reason="the server extra is not installed")

from tests.hf.tiny import save_tiny_checkpoint
from tests.server.running import RunningServer, running_server

# Long enough for tools in the system message, and for answers that outlast a test.
CONTEXT = 4096
END_ID = 2


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served") / "tiny"
    save_tiny_checkpoint(directory, "qwen3_moe")
    _let_it_talk(directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = CONTEXT
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def _let_it_talk(directory: Path) -> None:
    """Make the end of the sequence a token that is never the likeliest."""
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        if "lm_head.weight" in tensors:
            tensors["lm_head.weight"][END_ID] = 0
            save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="session")
def server(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    cache = tmp_path_factory.mktemp("cache")
    with running_server(tiny_checkpoint, cache=cache) as running:
        yield running

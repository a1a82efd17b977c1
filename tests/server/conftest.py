"""A server with a tiny random model, shared by all tests that do not end it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.server.checkpoint import save_served_checkpoint
from tests.server.running import RunningServer, running_server


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_served_checkpoint(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture
def tokenizer(tiny_checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


@pytest.fixture(scope="session")
def server(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    cache = tmp_path_factory.mktemp("cache")
    with running_server(tiny_checkpoint, cache=cache) as running:
        yield running

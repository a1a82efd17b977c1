"""Fixtures of the disk tests."""

from pathlib import Path
from typing import Any

import pytest

import tandem
from tests.disk.loading import EXPERTS, LAYERS, TOP_K, packed_model


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny packed model with 16 experts per layer, 4 per token."""
    return packed_model(
        tmp_path_factory.mktemp("disk"), num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        num_hidden_layers=LAYERS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def in_memory(packed: Path) -> Any:
    return tandem.load(packed)

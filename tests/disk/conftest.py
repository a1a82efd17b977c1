"""A tiny model on a disk."""

from pathlib import Path
from typing import Any

import pytest

import tandem
from tests.disk.loading import EXPERTS, LAYERS, TOP_K
from tests.hf.tiny import save_tiny_checkpoint


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in packed form: 16 experts, 4 for each token."""
    folder = tmp_path_factory.mktemp("disk")
    plain = save_tiny_checkpoint(
        folder / "plain", "qwen3_moe", num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        num_hidden_layers=LAYERS,
    )  # fmt: skip
    return tandem.save(tandem.load(plain, expert_dtype="int8"), folder / "packed")


@pytest.fixture(scope="module")
def in_memory(packed: Path) -> Any:
    return tandem.load(packed)

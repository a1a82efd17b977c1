"""Shared fixtures of the forecast tests."""

from pathlib import Path

import pytest

from tests.hf.tiny import save_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE; tests that change files make their own."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3_moe")

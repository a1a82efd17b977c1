"""A tokenizer whose chat template tests change."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.hf.tiny import save_tiny_checkpoint


@pytest.fixture(scope="package")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    found = AutoTokenizer.from_pretrained(directory)
    found.eos_token = "</s>"
    return found

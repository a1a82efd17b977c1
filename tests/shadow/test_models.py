"""Models of each kind, loaded for a GPU that is none, say what they say on the CPU."""

import os
from pathlib import Path

import pytest

from tests.architectures import architectures
from tests.generate.test_architectures import (
    NOT_GENERATING_UPSTREAM,
    NOT_TOKEN_BY_TOKEN,
    WHY_PADDED,
)
from tests.shadow.models import require_same_on_gpu

pytest.importorskip("triton")

# In `make test`; `make dry-gpu` has all.
KINDS = [
    "mixtral",  # plain attention
    "deepseek_v2",  # latents
    "qwen3_5_moe",  # states, and weights that a recording makes
]
IN_SLOTS = set(architectures()) - NOT_GENERATING_UPSTREAM - NOT_TOKEN_BY_TOKEN - set(WHY_PADDED)


@pytest.mark.parametrize(
    "name", sorted(IN_SLOTS) if os.environ.get("TANDEM_DRY_GPU") == "1" else KINDS
)
def test_a_model_says_the_same_on_a_gpu(name: str, tmp_path: Path) -> None:
    """Its decode steps are one graph each, whose missing experts the host computes."""
    gpu = require_same_on_gpu(name, tmp_path, expert_dtype="mxfp4")
    assert {"graph", "publish", "combine"} <= set(gpu.launched)

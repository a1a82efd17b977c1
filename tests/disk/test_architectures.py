"""Tests that every architecture gives the same bits over a disk as in memory.

With TANDEM_ALL_ON_DISK=1 (`make try-disk`) all architectures, otherwise one of each kind.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tandem
from tests.architectures import architectures, next_inputs, result_of, takes_cache, tiny_inputs
from tests.disk.loading import packed_model, slots_of, with_share

# Biases and transposed experts; latents; linear attention; norms behind experts; state spaces.
KINDS = ("gpt_oss", "deepseek_v3", "qwen3_next", "gemma4", "nemotron_h")
NAMES = architectures() if os.environ.get("TANDEM_ALL_ON_DISK") == "1" else KINDS


def outputs_of(model: Any) -> list[Tensor]:
    """Return the results of a prompt and of one step after it."""
    with torch.inference_mode():
        outputs = model(**tiny_inputs(model))
        found = [result_of(outputs)]
        if takes_cache(model):
            found.append(result_of(model(**next_inputs(model, outputs))))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_model_over_a_disk_has_the_bits_of_memory(name: str, tmp_path: Path) -> None:
    packed = packed_model(tmp_path, name)
    expected = outputs_of(tandem.load(packed))
    model = with_share(packed, 0.4)
    for found, right in zip(outputs_of(model), expected, strict=True):
        assert torch.equal(found, right)
    assert slots_of(model).statistics().misses > 0

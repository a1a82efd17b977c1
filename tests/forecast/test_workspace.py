"""Tests of the memory that a prompt's activations take, as plans count it."""

import pytest
import torch
from transformers import AutoConfig

from tandem.bench.model_shapes import MODEL_SHAPES
from tandem.forecast.sizes import ModelSizes, config_sizes
from tandem.forecast.workspace import embedded_bytes, tower_bytes, workspace_bytes
from tandem.hf.config import OffloadConfig


@pytest.fixture(scope="module")
def sizes() -> ModelSizes:
    shape = MODEL_SHAPES["qwen3-30b-a3b"]
    config = AutoConfig.for_model(shape.model_type, **shape.values)
    config.dtype = torch.bfloat16
    return config_sizes(config, OffloadConfig(expert_dtype="int4"))


def test_the_kernels_hold_the_memory_of_the_largest_batch_that_was_measured(
    sizes: ModelSizes,
) -> None:
    """Eight experts with 1,024 tokens each: more than a prompt of 512 routes, less than 2,048."""
    few, many = (workspace_bytes(sizes, count) for count in (512, 2048))
    more = workspace_bytes(sizes, 512, is_measured=True) - few
    assert more == pytest.approx((8 * 1024 - 512 * 8) * (5.25 * 2048 + 1.2 * 768), abs=1)
    assert workspace_bytes(sizes, 2048, is_measured=True) == many


def test_no_step_has_more_than_its_tokens(sizes: ModelSizes) -> None:
    assert workspace_bytes(sizes, 100_000) == workspace_bytes(sizes, 2048)
    assert workspace_bytes(sizes, 2048) == pytest.approx(2 * workspace_bytes(sizes, 1024), abs=1)


def test_a_vision_tower_takes_memory_for_its_images() -> None:
    vision = AutoConfig.for_model("qwen3_5_moe").vision_config
    assert tower_bytes(vision, 1024) == 1024 * 4 * 2 * (16 * 1152 + 3 * 4304)
    assert tower_bytes(None, 1024) == tower_bytes(vision, 0) == 0


def test_prompts_with_images_are_embedded_as_a_whole(sizes: ModelSizes) -> None:
    assert embedded_bytes(sizes.config, 2048) == 0
    assert embedded_bytes(sizes.config, 4 * 2304) == (4 * 2304 - 2048) * 8 * 2048

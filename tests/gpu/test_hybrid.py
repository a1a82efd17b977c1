"""Tests of whole models on a GPU against the all-CPU run, with both processors and the link."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.decode.padded import PaddedBatch
from tandem.experts.tracing.cache_statistics import CacheStatistics
from tests.architectures import architectures
from tests.gpu.models import DEVICE, compare_logits, load_pair
from tests.inside import runtime_in

# Full attention, windows, sinks, latents, shared experts, un-gated and biased experts, states.
NAMES = (
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "olmoe", "qwen2_moe"),
    *("glm4_moe", "granitemoe", "gemma4", "nemotron_h", "qwen3_next", "phimoe"),
)
# In bf16 near ties of tiny random routers go either way, which is no error.
LIMITS = {torch.float32: (1e-3, 0.05), torch.bfloat16: (2e-2, 1.0)}  # KL, gap of sure choices
IDS = torch.arange(40, 64)[None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in NAMES if name in set(architectures())])
def test_logits_are_those_of_the_cpu(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    alone, hybrid = load_pair(tmp_path, name, dtype)
    statistics = CacheStatistics()
    runtime_in(hybrid).executor.listeners.append(statistics)
    most, gap = LIMITS[dtype]
    with torch.no_grad():
        pairs = [(hybrid(IDS.to(DEVICE)).logits, alone(IDS).logits)]
        pairs += zip(steps_of(hybrid), steps_of(alone), strict=True)
    for ours, theirs in pairs:
        divergence, is_same = compare_logits(ours, theirs, gap)
        assert divergence <= most
        assert is_same
    assert statistics.hits > 0
    assert 0 < statistics.device_share < 1


def steps_of(model: Any) -> list[torch.Tensor]:
    """Return the logits of a prompt and of steps with fixed tokens."""
    pool = PaddedBatch(model, [[40, 41, 42, 43], [60] * 9], 0)
    return [pool.prefill().clone(), *(pool.decode([t, t + 1]).clone() for t in range(50, 60))]


@pytest.mark.parametrize("expert_dtype", ["int4", "int8", "mxfp4", "fp8"])
def test_packed_experts_say_the_same_on_both_processors(tmp_path: Path, expert_dtype: str) -> None:
    """The CPU's int formats round activations to int8, the GPU's do not, so the limit is wider."""
    _, hybrid = load_pair(tmp_path, "mixtral", torch.bfloat16, expert_dtype=expert_dtype)
    with torch.no_grad():
        mixed = hybrid(IDS.to(DEVICE)).logits
        runtime_in(hybrid).executor.cache.resize(0)  # the same weights, all on the CPU
        divergence, _ = compare_logits(mixed, hybrid(IDS.to(DEVICE)).logits)
    assert divergence <= 2e-2


def test_a_long_prompt_is_chunked_and_streams_its_experts(tmp_path: Path) -> None:
    alone, hybrid = load_pair(tmp_path, "mixtral", torch.float32)
    alone.config.max_position_embeddings = hybrid.config.max_position_embeddings = 8192
    ids = (torch.arange(2500) % 80 + 40)[None]
    with torch.no_grad():
        divergence, _ = compare_logits(hybrid(ids.to(DEVICE)).logits, alone(ids).logits)
    assert divergence <= 1e-3

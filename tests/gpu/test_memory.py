"""Tests of `gpu_memory` on a real GPU: the limit includes the KV cache, and too little fails."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.bench.model_shapes import ModelShape
from tandem.bench.random_model import build_random_model
from tandem.core.errors import CapacityError
from tandem.hardware.profiles import save_profile
from tandem.hf.config import OffloadConfig
from tests.decode.whole_pool import gpu_pool
from tests.experts.machines import make_machine
from tests.gpu.models import DEVICE, IS_DRY
from tests.hf.tiny import save_tiny_checkpoint
from tests.inside import runtime_in

# About 1.6 GB of experts and 0.2 GB of dense parts.
SHAPE = ModelShape(
    "qwen3_moe",
    {
        "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 64, "num_experts": 64, "num_experts_per_tok": 4,
        "moe_intermediate_size": 512, "intermediate_size": 2048, "norm_topk_prob": True,
        "vocab_size": 32_000, "max_position_embeddings": 8192,
    },
)  # fmt: skip


def build(tmp_path: Path, gpu_memory: str, link_bandwidth: str | None = None) -> Any:
    profile = tmp_path / "made-up.json"
    save_profile(make_machine(cpu=2e-4, gpu=4e-5, link=2e-4, dense=1e-4).profile, profile)
    config = OffloadConfig(
        device="cuda",
        expert_dtype="bf16",
        gpu_memory=gpu_memory,
        link_bandwidth=link_bandwidth,
        profile=str(profile),
        cache_dir=str(tmp_path),
        start_content="random",
    )
    return build_random_model(SHAPE, config, dense_dtype="none", device=DEVICE)


def test_the_peak_stays_within_two_hundredths_of_gpu_memory(tmp_path: Path) -> None:
    limit = 1_200_000_000
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = build(tmp_path, str(limit))
    cache = runtime_in(model).executor.cache
    slots_before = cache.num_slots
    pool = gpu_pool(model, [[50] * 2000], 200, has_replay=True)
    pool.prefill()
    for step in range(20):
        pool.decode([60 + step])
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_reserved() <= 1.02 * limit
    # And it is used: half of what dense parts, a prompt and the KV cache leave, at least.
    assert cache.num_slots >= 64, (slots_before, torch.cuda.memory_stats())
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_long_text_takes_memory_from_the_expert_cache(tmp_path: Path) -> None:
    model = build(tmp_path, "1.2GB")
    cache = runtime_in(model).executor.cache
    before = cache.num_slots
    pool = gpu_pool(model, [[50] * 100] * 16, 4000, has_replay=False)
    pool.prefill()
    pool.cache.reserve(4000)  # 16 rows are 0.5 GB: more than was kept, and less than there is
    pool.decode([50] * 16)
    assert cache.num_slots > 0
    assert cache.num_slots < before or IS_DRY
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_too_little_memory_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="give at least"):
        build(tmp_path, "10MB")
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_more_memory_than_the_card_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="the device has"):
        build(tmp_path, "100TB")


@pytest.mark.skipif(IS_DRY, reason="two processes on one real GPU")
def test_two_processes_on_one_gpu_do_not_break_each_other(tmp_path: Path) -> None:
    """Both run at the same time, and each gives the answers that it gives alone."""
    save_tiny_checkpoint(tmp_path / "mixtral", "mixtral")
    (alone,) = answers_of(1, tmp_path)
    for answer in answers_of(2, tmp_path):
        # Plans depend on time, and so do the last bits: a near tie may go the other way later.
        assert answer["tokens"][:50] == alone["tokens"][:50]
        assert answer["peak_bytes"] <= 1.02e9


def answers_of(count: int, directory: Path) -> list[dict[str, Any]]:
    """Run this many processes at once; return their answers."""
    command = [sys.executable, "-m", "tests.gpu.one_of_two", str(directory)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert "ready" in iter(process.stdout.readline, "").__next__()
        lines = [process.communicate("go\n", timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * count
    return [json.loads(line.splitlines()[-1]) for line in lines]


def test_closing_a_model_gives_the_limit_back(tmp_path: Path) -> None:
    model = build(tmp_path, "1.2GB")
    runtime_in(model).executor.close()
    assert IS_DRY or torch.cuda.get_per_process_memory_fraction() == 1.0

"""Tests of prompts that are captured on a GPU: logits of the CPU, whatever is resident."""

from pathlib import Path

import pytest
import torch

from tandem.decode.cuda.slots import new_cuda_slot_pool
from tandem.generate.generator import Generator
from tests.gpu.models import IS_DRY, compare_logits, load_pair
from tests.inside import runtime_in


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_captured_prompts_say_what_the_cpu_says(tmp_path: Path, name: str, share: float) -> None:
    alone, hybrid = load_pair(tmp_path, name, torch.float32, expert_dtype="int8")
    executor = runtime_in(hybrid).executor
    if share == 1.0:
        geometry = executor.cache.geometry
        every = geometry.num_layers * geometry.num_experts
        executor.resize_now(executor.cache.settings.slots_for(every), list(range(every)))
    ours, theirs = new_cuda_slot_pool(hybrid, 1), Generator(alone).slot_pool(1)
    lengths = [40, 64, 33, 50, 60, 41, 64, 37, 130]  # of which 130 are another size
    for number, length in enumerate(lengths):
        prompt = {0: [40 + (number + place * 7) % 60 for place in range(length)]}
        pairs = [(ours.prefill(prompt).clone(), theirs.prefill(prompt).clone())]
        pairs += [(ours.decode({0: 50 + number}).clone(), theirs.decode({0: 50 + number}).clone())]
        for mine, expected in pairs:
            divergence, is_same = compare_logits(mine, expected)
            # int8 experts round activations on the CPU alone.
            assert divergence <= 1e-2
            assert is_same
    captured = [step.replayed for step in ours.prompt_steps]
    assert IS_DRY or any(replayed.is_replaying for replayed in captured), captured[0].why_not

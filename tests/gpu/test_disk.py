"""Tests of experts on a disk with a real GPU: the CPU's answers, pinned slots, slow reads."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from tandem.core.errors import ExecutionError
from tandem.decode.cuda.slots import new_cuda_slot_pool
from tandem.generate.generator import Generator
from tests.disk.loading import memory_for, slots_of
from tests.gpu.models import DEVICE, compare_logits, load_hybrid
from tests.hf.tiny import save_tiny_checkpoint
from tests.inside import runtime_in

IDS = torch.arange(40, 100)[None]
TOKENS = range(50, 66)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    plain = save_tiny_checkpoint(directory / "plain", "qwen3_moe")
    model = tandem.load(plain, dtype="float32", expert_dtype="mxfp4")
    return tandem.save(model, directory / "packed")


@pytest.fixture
def hybrid(packed: Path, tmp_path: Path) -> Any:
    memory = memory_for(packed, 0.4, has_device=True)
    return load_hybrid(packed, "float32", tmp_path, expert_memory=memory)


def test_prompts_and_steps_say_what_the_cpu_says(packed: Path, hybrid: Any) -> None:
    alone = tandem.load(packed, dtype="float32", threads=2)
    with torch.no_grad():
        pairs = [(hybrid(IDS.to(DEVICE)).logits, alone(IDS).logits)]
    ours, theirs = new_cuda_slot_pool(hybrid, 2), Generator(alone).slot_pool(2)
    prompts = {0: [40, 41, 42], 1: [60] * 9}
    pairs.append((ours.prefill(prompts), theirs.prefill(prompts)))
    for token in TOKENS:
        if token == TOKENS[-2]:  # a step in one graph is abandoned, and planned
            slots_of(hybrid).native.fail(0, 1, 1.5)
        tokens = {0: token, 1: token + 7}
        pairs.append((ours.decode(tokens).clone(), theirs.decode(tokens).clone()))
        slots_of(hybrid).native.fail(0, 0, 0.0)
    for here, there in pairs:
        divergence, is_same = compare_logits(here, there)
        assert divergence <= 1e-3
        assert is_same
    assert slots_of(hybrid).statistics().read_bytes > 0


def test_a_failed_read_is_a_sentence_and_the_next_request_is_right(
    packed: Path, hybrid: Any
) -> None:
    runtime_in(hybrid).executor.resize(0)  # everything requested is read
    with torch.no_grad():
        slots_of(hybrid).native.fail(errno.EIO, 1, 0.0)
        with pytest.raises(ExecutionError, match=r"Input/output error.*request is lost"):
            hybrid(IDS.to(DEVICE))
        slots_of(hybrid).native.fail(0, 0, 0.0)
        found = hybrid(IDS.to(DEVICE)).logits
        expected = tandem.load(packed, dtype="float32", threads=2)(IDS).logits
    assert compare_logits(found, expected)[0] <= 1e-3

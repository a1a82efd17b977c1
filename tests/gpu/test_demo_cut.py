"""Tests of a cut of the demo model on a GPU, against the all-CPU run."""

import statistics
from pathlib import Path

import pytest
import torch

import tandem
from tandem.experts.tracing.cache_statistics import CacheStatistics
from tandem.generate.generator import Generator
from tests.decode.whole_pool import WholePool, gpu_pool
from tests.gpu.demo_cut import MOST_BYTES, find_demo_cut, size_of, texts_of
from tests.gpu.models import DEVICE, compare_logits, load_hybrid
from tests.inside import runtime_in

MOST_DIVERGENCE = 1e-3
# For one token: a router's near tie depends on which of its experts are on the GPU.
MOST_OF_ONE = 1e-2


@pytest.fixture(scope="module")
def cut() -> Path:
    found = find_demo_cut()
    if found is None:
        pytest.skip("no demo model here: python -m tests.gpu.demo_cut writes build/demo-cut")
    assert size_of(found) < MOST_BYTES
    return found


def test_a_prompt_gives_the_cpus_logits_on_both_processors(cut: Path, tmp_path: Path) -> None:
    alone, hybrid = tandem.load(cut, dtype="float32"), load_hybrid(cut, "float32", tmp_path)
    statistics = CacheStatistics()
    runtime_in(hybrid).executor.listeners.append(statistics)
    ids = torch.tensor(texts_of(cut))
    with torch.no_grad():
        for part in ids.split(1):
            divergence, is_same = compare_logits(hybrid(part.to(DEVICE)).logits, alone(part).logits)
            assert divergence <= MOST_DIVERGENCE
            assert is_same
    assert statistics.hits > 0
    assert 0 < statistics.device_share < 1


def test_captured_steps_give_the_cpus_logits(cut: Path, tmp_path: Path) -> None:
    alone, hybrid = tandem.load(cut, dtype="float32"), load_hybrid(cut, "float32", tmp_path)
    text = texts_of(cut)[0]
    captured = gpu_pool(hybrid, [text[:32]], 64, has_replay=True)
    plain = WholePool(Generator(alone).slot_pool(1), [text[:32]])
    pairs = [(captured.prefill(), plain.prefill())]
    pairs += [(captured.decode([t]).clone(), plain.decode([t]).clone()) for t in text[32:64]]
    assert captured.step.is_replaying, captured.step.why_not
    compared = [compare_logits(ours, theirs) for ours, theirs in pairs]
    assert all(is_same for _, is_same in compared)
    divergences = [divergence for divergence, _ in compared]
    assert max(divergences) <= MOST_OF_ONE
    assert statistics.mean(divergences) <= MOST_DIVERGENCE

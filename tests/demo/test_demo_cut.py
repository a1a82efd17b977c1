"""Tests of the demo model's cut for GPU tests, on the emulated device."""

from pathlib import Path

import pytest
import torch

import tandem
from tests.gpu.demo_cut import texts_of, write_demo_cut
from tests.gpu.models import compare_logits


@pytest.mark.slow
@pytest.mark.demo
@pytest.mark.usefixtures("all_threads")
def test_a_cut_says_on_two_processors_what_it_says_on_one(demo_cache: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    write_demo_cut(demo_cache / "models" / "demo", cut, layers=1, expert_dtype="bf16")
    alone = tandem.load(cut, dtype="float32")
    hybrid = tandem.load(
        cut, dtype="float32", device="emulated", gpu_memory="20MB", cache_dir=str(tmp_path)
    )
    ids = torch.tensor(texts_of(cut)[:2])
    with torch.no_grad():
        expected, found = alone(ids).logits, hybrid(ids).logits
    divergence, is_same = compare_logits(found, expected)
    assert divergence <= 1e-3
    assert is_same
    # The text is not noise: the likeliest tokens differ between positions.
    assert len(set(expected.argmax(-1).flatten().tolist())) > 20

"""Tests of the effect on answers of rounding one part of a model."""

from pathlib import Path

import pytest
import torch

import tandem
from tandem.checkpoint.importance import Importance
from tandem.hf.runtime import require_runtime
from tandem.quality.parts import projections
from tandem.quality.probing import probe
from tandem.quality.texts import Window

WINDOWS = [Window("a", tuple(range(5, 37))), Window("b", tuple(range(30, 62))), Window("b", (7,))]


@pytest.mark.parametrize("expert_dtype", ["fp32", "bf16"])
def test_every_part_counts_and_the_model_stays_as_it_was(
    checkpoint: Path, expert_dtype: str
) -> None:
    model = tandem.load(checkpoint, dtype="float32", expert_dtype=expert_dtype, threads=1)
    ids = torch.tensor([WINDOWS[0].ids])
    with torch.no_grad():
        before = model(input_ids=ids).logits
    done: list[tuple[int, int]] = []
    found = probe(model, WINDOWS, Importance(checkpoint, lambda _: None), lambda *x: done.append(x))
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, before)
    experts = [name for layer in require_runtime(model).store for name in projections(layer)]
    assert len(experts) == 8
    for name in (*experts, "lm_head.weight", "model.embed_tokens.weight"):
        assert found[name] > 1e-8
    assert done[-1][0] == done[-1][1] == len(done)
    attention = [name for name in found if "layers.0.self_attn" in name]
    assert len({found[name] for name in attention}) == 1

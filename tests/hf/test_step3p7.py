"""Step-3.7 beside what all architectures are tested for: clamps and padding of its router."""

from pathlib import Path
from typing import Any

import torch

import tandem
from tandem.kernels.native import ActivationKind
from tests.architectures import EXPERTS, build_tiny_model, experts_blocks, experts_modules


def test_padding_adds_nothing_and_clamps_are_native(tmp_path: Path) -> None:
    model: Any = build_tiny_model("step3p7")
    model.save_pretrained(tmp_path)
    offloaded: Any = tandem.load(tmp_path, dtype="float32", expert_dtype="fp16")
    hidden = 3 * torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([[0.5, 0.25], [0.5, 0.25]])
    chosen = torch.tensor([[EXPERTS, EXPERTS], [1, EXPERTS]])
    is_there = chosen < EXPERTS  # 5.17's own code takes no padding
    kinds = []
    pairs: Any = zip(experts_blocks(model), experts_modules(offloaded), strict=True)
    for eager, ours in pairs:
        kinds.append(ours.tandem_experts.functions.native.kind)
        with torch.no_grad():
            found = ours(hidden, chosen, weights)
            expected = eager(hidden, chosen * is_there, weights * is_there)
        assert not found[0].any()
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-3)
    assert kinds == [ActivationKind.SWIGLU] + [ActivationKind.LIMITED_SILU] * 2

"""Tests of Step-3.7 beyond those of all architectures: clamps, and its router's padding."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import tandem
from tandem.kernels.native import ActivationKind
from tests.architecture_sizes import EXPERTS
from tests.architectures import build_tiny_model, experts_blocks, experts_modules
from tests.inside import logits_of, relative_error


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


def test_step_3_5_is_the_text_model_by_itself(tmp_path: Path) -> None:
    model: Any = build_tiny_model("step3p7")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    text = {name: x for name, x in weights.items() if name.startswith(("model.", "lm_head."))}
    assert "model.layers.1.moe.gate_proj.weight" in text  # as released
    save_file(text, tmp_path / "model.safetensors", metadata={"format": "pt"})
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())["text_config"]
    file.write_text(json.dumps(config | {"architectures": ["Step3p5ForCausalLM"]}))
    found = tandem.load(tmp_path, dtype="float32", threads=1)
    assert type(found).__name__ == "Step3p5ForCausalLM"
    assert relative_error(logits_of(found), logits_of(model)) < 1e-5
    short = found(input_ids=torch.tensor([[40, 41, 42]]), logits_to_keep=1).logits
    assert short.shape == (1, 1, 128)

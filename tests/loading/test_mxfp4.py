"""Tests of gpt-oss as published: fused MXFP4 experts, biases, transposed and interleaved."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import tandem
from tandem.kernels.formats import find_format, pack
from tests.inside import logits_of, relative_error, runtime_in
from tests.loading.checkpoints import write_plain

pytestmark = pytest.mark.seam


def mxfp4(fused: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks and scales of weights (num_experts, inputs, outputs)."""
    rows = fused.transpose(1, 2).float()  # rows are the outputs
    blocks, scales = [], []
    for expert in rows:
        packed = pack(expert, find_format("mxfp4"))
        coded = packed.blocks.read(packed.format)
        assert coded.scales is not None
        codes = coded.codes.unflatten(1, (-1, 16, 2))
        blocks.append(codes[..., 0] | (codes[..., 1] << 4))
        scales.append(coded.scales)
    return torch.stack(blocks), torch.stack(scales)


@pytest.fixture
def checkpoints(tmp_path: Path) -> tuple[Path, Path]:
    """Return an MXFP4 checkpoint, and one with the values that Transformers decodes."""
    plain = write_plain(tmp_path / "plain", "gpt_oss")
    config = json.loads((plain / "config.json").read_text())
    stored: dict[str, Tensor] = {}
    decoded: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if tensor.dim() == 3:
            blocks, scales = mxfp4(tensor)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            decoded[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        else:
            stored[name] = tensor
            decoded[name] = tensor.float()
    quantised = tmp_path / "mxfp4"
    for directory, tensors in ((quantised, stored), (tmp_path / "decoded", decoded)):
        directory.mkdir()
        save_file({n: t.contiguous() for n, t in tensors.items()}, directory / "model.safetensors")
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    text = json.dumps(config | {"quantization_config": quantization})
    (quantised / "config.json").write_text(text)
    (tmp_path / "decoded" / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return quantised, tmp_path / "decoded"


def test_codes_are_taken_over(checkpoints: tuple[Path, Path]) -> None:
    quantised, decoded = checkpoints
    store = runtime_in(tandem.load(quantised)).store
    expected = runtime_in(tandem.load(decoded, expert_dtype="fp32")).store
    for layer, plain in zip(store, expected, strict=True):
        assert layer.layout.format.name == "mxfp4"
        for expert in range(layer.arrivals.num_experts):
            found, values = layer.weights(expert), plain.weights(expert)
            up = values.up.T
            assert torch.equal(found.up, torch.cat([up[0::2], up[1::2]]))
            assert torch.equal(found.down, values.down.T)


def test_answers_are_those_of_the_decoded_weights(checkpoints: tuple[Path, Path]) -> None:
    quantised, decoded = checkpoints
    model = tandem.load(quantised, dtype="fp32")
    plain = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32)
    assert relative_error(logits_of(model), logits_of(plain)) < 0.03

"""GGUF files written with the gguf package: answers are those of Transformers' own reading."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import tandem
from tandem.core.errors import ModelError, UnsupportedModelError
from tests.architectures import result_of, tiny_inputs

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
FORMATS = {
    "Q4_0": "int4-g32", "Q4_1": "int4z-g32", "Q5_0": "int8-g32", "Q8_0": "int8-g32",
    "MXFP4": "mxfp4",
}  # fmt: skip


def tiny_model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=64, intermediate_size=64, norm_topk_prob=True,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)  # far from uniform answers
    return model


def gguf_names(model: Qwen3MoeForCausalLM) -> dict[str, Tensor]:
    """Return a model's tensors by their names in GGUF."""
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        prefix, _, rest = name.removeprefix("model.layers.").partition(".")
        layer = f"blk.{prefix}." if prefix.isdigit() else ""
        inner = rest if layer else name
        if inner == "mlp.experts.gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            found |= {f"{layer}ffn_gate_exps.weight": gate, f"{layer}ffn_up_exps.weight": up}
        elif inner == "mlp.experts.down_proj":
            found[f"{layer}ffn_down_exps.weight"] = tensor
        else:
            found[f"{layer}{NAMES[inner.removesuffix('.weight')]}.weight"] = tensor
    return found


def write_gguf(
    file: Path,
    model: Qwen3MoeForCausalLM,
    kind: str,
    architecture: str = "qwen3moe",
    also: Callable[[GGUFWriter], None] = lambda _: None,
) -> None:
    """Write a model with its matrices in blocks, and give it the values that these stand for."""
    config, writer = model.config, GGUFWriter(file, architecture)
    writer.add_context_length(256)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    also(writer)
    block = GGMLQuantizationType[kind]
    for name, tensor in gguf_names(model).items():
        values = tensor.numpy().astype(np.float32)
        if values.ndim < 2 or "ffn_gate_inp" in name:
            writer.add_tensor(name, values)
            continue
        data = quantize(values, block)
        writer.add_tensor(name, data, raw_dtype=block)
        tensor.copy_(torch.from_numpy(dequantize(data, block)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", FORMATS)
def test_answers_are_those_of_the_decoded_blocks(kind: str, tmp_path: Path) -> None:
    expected = tiny_model()
    file = tmp_path / "model.gguf"
    with torch.no_grad():
        write_gguf(file, expected, kind)
        model = tandem.load(file, dtype="fp32")
        assert {x.layout.format.name for x in model.hf_quantizer.store} == {FORMATS[kind]}
        found, wanted = (result_of(m(**tiny_inputs(m))) for m in (model, expected))
    # Activations are rounded to int8, and may turn a router's near tie; other weights give 1.
    assert ((found - wanted).norm() / wanted.norm()).item() < 0.1
    dense = expected.state_dict()
    for name, value in model.state_dict().items():
        if "experts." not in name:
            assert torch.equal(value, dense[name]), name
    for layer in model.hf_quantizer.store:
        up = dense[f"{layer.arrivals.name}.gate_up_proj"]
        assert torch.equal(layer.weights(3).up, up[3])
        assert torch.equal(layer.weights(3).down, dense[f"{layer.arrivals.name}.down_proj"][3])


def test_blocks_without_a_format_name_an_expert_dtype(tmp_path: Path) -> None:
    model, file = tiny_model(), tmp_path / "model.gguf"
    with torch.no_grad():
        write_gguf(file, model, "Q5_1")
    with pytest.raises(UnsupportedModelError, match=r"GGUF blocks Q5_1.*give an expert_dtype"):
        tandem.load(file)
    loaded = tandem.load(file, expert_dtype="int8-g32", dtype="fp32")
    with torch.no_grad():
        found, wanted = (result_of(m(**tiny_inputs(m))) for m in (loaded, model))
    assert ((found - wanted).norm() / wanted.norm()).item() < 0.03


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    with torch.no_grad():
        write_gguf(tmp_path / "model.gguf", tiny_model(), "Q8_0", architecture="llama")
    with pytest.raises(UnsupportedModelError, match=r"architecture 'llama'; of GGUF Tandem reads"):
        tandem.load(tmp_path / "model.gguf")


@pytest.mark.parametrize("length", [10, 4000, -100])
def test_a_damaged_file(tmp_path: Path, length: int) -> None:
    file = tmp_path / "model.gguf"
    with torch.no_grad():
        write_gguf(file, tiny_model(), "Q8_0")
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ModelError, match=r"model\.gguf .*download it again"):
        tandem.load(file)

"""Tiny models as GGUF files, written with the gguf package by llama.cpp's rules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
)
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.sinks": "attn_sinks",
    "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "mlp.e_score_correction_bias": "exp_probs_b",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b", "mlp.gate.e_score_correction_bias": "exp_probs_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_COMMON = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_DEEPSEEK = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 32, "n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 96,
    "intermediate_size": 128, "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "original_max_position_embeddings": 64, "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}  # fmt: skip
_QWEN3 = {
    "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 96, "intermediate_size": 64,
    "norm_topk_prob": True,
}  # fmt: skip
# By GGUF architecture: Transformers' model type, and config values beside the common ones.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3moe": ("qwen3_moe", _QWEN3),
    "qwen3vlmoe": ("qwen3_moe", _QWEN3),
    "qwen2moe": ("qwen2_moe", {
        "num_experts": 8, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 128,
        "intermediate_size": 64,
    }),
    "llama": ("mixtral", {"num_local_experts": 4, "intermediate_size": 96, "head_dim": 16}),
    "olmoe": ("olmoe", {"num_experts": 8, "intermediate_size": 96, "num_key_value_heads": 4}),
    "gpt-oss": ("gpt_oss", {
        "num_local_experts": 4, "intermediate_size": 64, "head_dim": 16, "sliding_window": 4,
    }),
    "deepseek2": ("deepseek_v2", _DEEPSEEK | {"q_lora_rank": 32}),
    "deepseek2 v3": ("deepseek_v3", _DEEPSEEK | {
        "q_lora_rank": 32, "n_group": 2, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    }),
    "glm4moe": ("glm4_moe", {
        "head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 96,
        "intermediate_size": 128, "first_k_dense_replace": 1, "use_qk_norm": True,
        "attention_bias": True, "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1,
    }),
    "minimax-m2": ("minimax_m2", {
        "num_local_experts": 8, "intermediate_size": 96, "head_dim": 32, "rotary_dim": 16,
        "use_routing_bias": True,
    }),
}  # fmt: skip


# Sizes for blocks of 256 numbers.
WIDE = {
    "hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 256, "num_experts": 4,
}  # fmt: skip
# The types of mixtures by the begin of a tensor's name: llama.cpp's Q4_K_M, where half of the
# second projections and the values are of a larger type, and one whose layers differ more.
MIXTURES = {
    "Q4_K_M": {
        "blk.0.ffn_down_exps": "Q6_K", "blk.0.attn_v": "Q6_K", "output": "Q6_K", "": "Q4_K",
    },
    "UD-Q4_K_XL": {
        "token_embd": "Q6_K", "output": "Q6_K", "blk.0.ffn_down_exps": "Q5_K",
        "blk.1.ffn_gate_exps": "IQ4_XS", "blk.1.ffn_up_exps": "IQ4_XS", "blk.0.attn_q": "Q8_0",
        "blk.0.attn_k": "Q5_K", "blk.0.attn_v": "Q6_K", "blk.0.attn_output": "Q8_0", "": "Q4_K",
    },
    # Gate and up of different types, which the larger type's format holds.
    "unlike Q4_K": {
        "blk.0.ffn_gate_exps": "Q5_K", "blk.1.ffn_gate_exps": "Q3_K", "blk.1.ffn_up_exps": "Q6_K",
        "": "Q4_K",
    },
    "unlike IQ4_NL": {
        "blk.0.ffn_gate_exps": "Q8_0", "blk.1.ffn_gate_exps": "Q4_0", "blk.1.ffn_up_exps": "Q5_0",
        "blk.1.ffn_down_exps": "Q5_1", "": "IQ4_NL",
    },
    "a layer in BF16": {"blk.0.ffn": "BF16", "": "Q8_0"},
    "a projection in 16 bits": {
        "blk.0.ffn_down_exps": "BF16", "blk.1.ffn_gate_exps": "F16", "blk.1.ffn_up_exps": "F16",
        "": "Q8_0",
    },
    # Of types that no format holds together.
    "apart": {
        "blk.0.ffn_gate_exps": "IQ4_XS", "blk.0.ffn_up_exps": "Q5_K", "blk.1.ffn_gate_exps": "Q8_0",
        "blk.1.ffn_up_exps": "Q6_K", "": "Q4_K",
    },
}  # fmt: skip


def tiny_model(architecture: str = "qwen3moe", sizes: dict[str, int] | None = None) -> Any:
    """Return a tiny model with random weights and non-uniform answers."""
    torch.manual_seed(0)
    model_type, values = TINY[architecture]
    config = AutoConfig.for_model(model_type, **(_COMMON | values | (sizes or {})))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "bias" in name or "sinks" in name:
                parameter.normal_(std=0.1)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.normal_(std=0.1)
    return model


def write_gguf(
    file: Path,
    model: Any,
    kind: str,
    architecture: str = "qwen3moe",
    also: Callable[[GGUFWriter], None] = lambda _: None,
    writer: GGUFWriter | None = None,
) -> Path:
    """Write a model with its matrices in blocks, and set the model's weights to the blocks' values.

    `kind` is a type or a mixture of types. `writer` may split the file.
    """
    writer = writer or GGUFWriter(file, architecture.partition(" ")[0])
    _write_metadata(writer, model.config)
    also(writer)
    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            values = np.ascontiguousarray(tensor.numpy(), dtype=np.float32)
            if values.ndim > 3:  # heads, pairs, both of a pair, inputs
                values = values.reshape(-1, values.shape[-1])
            is_vector = values.ndim < 2 or name.endswith(".bias")
            if is_vector or "ffn_gate_inp" in name or kind == "F32":
                writer.add_tensor(name, values)
                continue
            block = GGMLQuantizationType[_kind_of(name, kind)]
            data = quantised_blocks(values, block)
            writer.add_tensor(name, data, raw_dtype=block)
            decoded = torch.from_numpy(dequantize(data, block)).view(values.shape)
            if kind == "NVFP4":
                factors = np.linspace(1, 1.75, values.shape[0] if values.ndim == 3 else 1)
                numbers = factors.astype(np.float16).astype(np.float32)
                writer.add_tensor(name.replace(".weight", ".scale"), numbers)
                decoded *= torch.from_numpy(numbers).view(-1, *[1] * (values.ndim - 1))
            tensor.copy_(decoded.view(tensor.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _kind_of(name: str, kind: str) -> str:
    mixture = MIXTURES.get(kind, {"": kind})
    return next(block for begin, block in mixture.items() if name.startswith(begin))


# The offsets of fp16 factors in blocks that the gguf package does not write.
FACTORS: dict[str, tuple[int, ...]] = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_NL": (0,), "IQ4_XS": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ2_XXS": (0,),
    "IQ2_XS": (0,), "IQ2_S": (0,), "IQ1_S": (0,),
}  # fmt: skip


def quantised_blocks(values: NDArray[np.float32], block: GGMLQuantizationType) -> NDArray[np.uint8]:
    """Return blocks (..., bytes): rounded values, or random blocks of usual magnitude."""
    if block.name not in (*FACTORS, "NVFP4", "IQ1_M"):
        return quantize(values, block)
    numbers, size = GGML_QUANT_SIZES[block]
    count = values.size // numbers
    random = np.random.default_rng(count + values.shape[-1])
    drawn = random.integers(0, 256, (count, size), dtype=np.uint8)
    if block.name == "NVFP4":
        drawn[:, :4] = random.integers(0x08, 0x18, (count, 4))
    if block.name == "IQ1_M":  # a factor in four parts, about as large as the others'
        drawn[:, 53:56:2] = drawn[:, 53:56:2] & 15 | np.array([0x80, 0], np.uint8)
    for place in FACTORS.get(block.name, ()):
        factors = random.uniform(1e-4, 2e-4, (count, 1)).astype(np.float16)
        drawn[:, place : place + 2] = factors.view(np.uint8)
    return drawn.reshape(*values.shape[:-1], -1)


def _write_metadata(writer: GGUFWriter, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next(n for name in counts if (n := getattr(config, name, None)))
    has_latents = hasattr(config, "kv_lora_rank")  # one head for keys and values, of this width
    if has_latents:
        head_dim = config.kv_lora_rank + config.qk_rope_head_dim
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(width)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1 if has_latents else config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(config.kv_lora_rank if has_latents else head_dim)
    rotary = config.qk_rope_head_dim if has_latents else getattr(config, "rotary_dim", head_dim)
    if config.model_type == "glm4_moe":
        rotary = int(head_dim * config.rope_parameters["partial_rotary_factor"])
    writer.add_rope_dimension_count(rotary)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_expert_count(num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        original = config.rope_parameters["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
    if config.model_type.startswith("deepseek"):
        _write_deepseek(writer, config)
        return
    if config.model_type == "glm4_moe":
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if config.model_type == "minimax_m2":
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if config.model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _write_deepseek(writer: GGUFWriter, config: Any) -> None:
    scaling, is_v3 = config.rope_parameters, config.model_type == "deepseek_v3"
    for key, value in {
        "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": config.first_k_dense_replace,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        "expert_gating_func": 2 if is_v3 else 1,
        **({"attention.q_lora_rank": config.q_lora_rank} if config.q_lora_rank else {}),
        **({"expert_group_count": 2, "expert_group_used_count": 1} if is_v3 else {}),
    }.items():
        writer.add_uint32(f"deepseek2.{key}", value)
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(bool(config.norm_topk_prob))


def _tensors(model: Any) -> dict[str, Tensor]:
    """Return a model's tensors by their GGUF names, as views, so that they can be set."""
    found: dict[str, Tensor] = {}
    is_tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if is_tied and name == "lm_head.weight":
            continue
        number, _, rest = name.removeprefix("model.layers.").partition(".")
        layer = f"blk.{number}." if number.isdigit() else ""
        inner = rest if layer else name
        if ".experts." in inner:
            found |= {layer + key: value for key, value in _experts(model, inner, tensor).items()}
            continue
        if inner == "self_attn.kv_b_proj.weight":
            found |= {layer + key: value for key, value in _latents(model.config, tensor).items()}
            continue
        stem, kind = inner, "weight"
        if inner.endswith((".weight", ".bias")):
            stem, _, kind = inner.rpartition(".")
        if stem.endswith("correction_bias"):
            kind = "bias"
        short = _NAMES[stem]
        if model.config.model_type in ("gpt_oss", "glm4_moe") and short == "ffn_norm":
            short = "post_attention_norm"
        if model.config.model_type == "mixtral" and short in ("attn_q", "attn_k"):
            tensor = _paired(tensor, model.config.head_dim)
        found[f"{layer}{short}.{kind}"] = tensor
    return found


def _latents(config: Any, tensor: Tensor) -> dict[str, Tensor]:
    """Return the two tensors that expand latents to keys and values; the keys' is transposed."""
    heads = tensor.view(config.num_attention_heads, -1, tensor.shape[-1])
    keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    return {"attn_k_b.weight": keys.transpose(1, 2), "attn_v_b.weight": values}


def _experts(model: Any, inner: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors of one expert parameter; gate and up are separate."""
    part = inner.rpartition(".")[2]
    kind = "bias" if part.endswith("_bias") else "weight"
    is_turned = model.config.model_type == "gpt_oss"
    if is_turned and kind == "weight":
        tensor = tensor.transpose(1, 2)  # (num_experts, outputs, inputs)
    if part.startswith("down"):
        return {f"ffn_down_exps.{kind}": tensor}
    if is_turned:
        gate, up = tensor[:, 0::2], tensor[:, 1::2]
    else:
        gate, up = tensor.chunk(2, dim=1)
    return {f"ffn_gate_exps.{kind}": gate, f"ffn_up_exps.{kind}": up}


def _paired(tensor: Tensor, head_dim: int) -> Tensor:
    """Return rows of queries or keys in llama.cpp's order: rotary pairs are adjacent."""
    return tensor.view(-1, 2, head_dim // 2, tensor.shape[-1]).transpose(1, 2)

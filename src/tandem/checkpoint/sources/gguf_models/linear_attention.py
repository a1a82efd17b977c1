"""Architectures with gated delta rules or short convolutions: Qwen3-Next, Qwen3.5, LFM2, Kimi."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.checkpoint.sources.gguf_header import GgufHeader
from tandem.checkpoint.sources.gguf_models.architecture import (
    Architecture,
    Names,
    Recipe,
    less_one,
)
from tandem.checkpoint.sources.gguf_models.config_values import (
    config_of,
    each_layer,
    head_dim,
    layer_types,
    mlp_types,
    num_dense_layers,
    partial_rope,
    routing,
    widths,
)
from tandem.checkpoint.sources.gguf_models.latent_attention import latents
from tandem.foreign_types import PreTrainedConfig


def qwen3_next(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Qwen3-Next."""
    return config_of(header, "qwen3_next", **_delta_rule(header), **_experts(header))


def qwen3_5(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Qwen3.5 or 3.6 with experts."""
    values = _delta_rule(header) | _experts(header)
    return _with_sections(header, config_of(header, "qwen3_5_moe_text", **values))


def qwen3_5_dense(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Qwen3.5 or 3.6 without experts."""
    values = _delta_rule(header) | {"intermediate_size": header.value("feed_forward_length")}
    config = config_of(header, "qwen3_5_text", ("num_experts_per_tok",), **values)
    return _with_sections(header, config)


def _with_sections(header: GgufHeader, config: PreTrainedConfig) -> PreTrainedConfig:
    sections = header.value("rope.dimension_sections", [])
    config.rope_parameters["mrope_section"] = [section for section in sections if section]
    config.rope_parameters["mrope_interleaved"] = True
    return config


def _delta_rule(header: GgufHeader) -> dict[str, object]:
    heads = header.value("ssm.time_step_rank", 1)
    return {
        "rope_parameters": partial_rope(header),
        "head_dim": head_dim(header),
        "layer_types": layer_types(header, ssm_a="linear_attention"),
        "linear_conv_kernel_dim": header.value("ssm.conv_kernel"),
        "linear_key_head_dim": header.value("ssm.state_size"),
        "linear_value_head_dim": header.value("ssm.inner_size", 0) // heads,
        "linear_num_key_heads": header.value("ssm.group_count"),
        "linear_num_value_heads": heads,
    }


def _experts(header: GgufHeader) -> dict[str, object]:
    shared = header.rows("blk.0.ffn_gate_shexp.weight")
    return {"shared_expert_intermediate_size": shared, **widths(header)}


def lfm2(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of an LFM2 with experts."""
    heads = each_layer(header, "attention.head_count_kv")
    return config_of(
        header,
        "lfm2_moe",
        ("rms_norm_eps",),
        norm_eps=header.value("attention.layer_norm_rms_epsilon"),
        num_key_value_heads=max(heads),
        layer_types=["full_attention" if count else "conv" for count in heads],
        conv_L_cache=header.value("shortconv.l_cache"),
        conv_bias="blk.0.shortconv.in_proj.bias" in header.tensors,
        num_dense_layers=num_dense_layers(header),
        routed_scaling_factor=header.value("expert_weights_scale", 1.0),
        use_expert_bias=any("exp_probs_b" in name for name in header.tensors),
        **widths(header),
    )


def kimi(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Kimi-Linear, whose attention uses no positions."""
    return config_of(header, "kimi_linear", ("rope_parameters",), **_kimi_values(header))


def bailing(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Bailing (Ling) V3."""
    limit = header.value("kda.gate_lower_bound", -5.0)
    values = _kimi_values(header) | {"first_k_dense_replace": num_dense_layers(header)}
    del values["q_lora_rank"]
    return config_of(
        header, "bailing_hybrid", num_mtp_layers=0, kda_lower_bound=limit,
        short_conv_kernel_size=header.value("ssm.conv_kernel"),
        head_dim=header.value("kda.head_dim"), **values,
    )  # fmt: skip


def _kimi_values(header: GgufHeader) -> dict[str, object]:
    values = latents(header) | routing(header)
    values["num_local_experts"] = values.pop("n_routed_experts")
    del values["first_k_dense_replace"]
    return values | {
        "mlp_layer_types": mlp_types(header),
        "num_attention_heads": max(each_layer(header, "attention.head_count")),
        "num_key_value_heads": max(each_layer(header, "attention.head_count")),
        "layer_types": layer_types(header, ssm_a="linear_attention"),
        "linear_conv_kernel_dim": header.value("ssm.conv_kernel"),
        "linear_head_dim": header.value("kda.head_dim"),
        "linear_num_heads": max(each_layer(header, "attention.head_count")),
    }


def log_of_negative(parts: Sequence[Tensor], config: PreTrainedConfig) -> Tensor:
    """Return the logarithm of a decay rate; llama.cpp stores the negative rate."""
    (rate,) = parts
    return rate.float().neg().log()


def _log(parts: Sequence[Tensor], config: PreTrainedConfig) -> Tensor:
    (rate,) = parts
    return rate.float().log()


def _tiled(config: PreTrainedConfig, width: int) -> Tensor:
    """Return the row in the file for each row of the value heads in Transformers.

    Transformers groups value heads by key head; llama.cpp stores the first value head of every key
    head, then the second of every key head, and so on.
    """
    keys = config.linear_num_key_heads
    rows = torch.arange(config.linear_num_value_heads * width, device="cpu")
    return rows.view(-1, keys, width).transpose(0, 1).flatten()


def _tiled_values(config: PreTrainedConfig) -> Tensor:
    return _tiled(config, config.linear_value_head_dim)


def _tiled_heads(config: PreTrainedConfig) -> Tensor:
    return _tiled(config, 1)


def _tiled_after_keys(config: PreTrainedConfig) -> Tensor:
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return torch.cat((torch.arange(before, device="cpu"), before + _tiled_values(config)))


def _by_key_head(config: PreTrainedConfig) -> Tensor:
    """Return the row in the file for each row of `in_proj_qkvz`, which is grouped by key head."""
    keys, width = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    rows = torch.arange(2 * (keys * width + values), device="cpu")
    parts = rows.split([keys * width, keys * width, values, values])
    return torch.cat([part.view(keys, -1) for part in parts], dim=1).flatten()


def _heads_in_order(parts: Sequence[Tensor], config: PreTrainedConfig) -> Tensor:
    return log_of_negative(parts, config)[_tiled_heads(config)]


_PLUS_ONE: Names = {
    "model.norm": Recipe(("output_norm",), values=less_one),
    "input_layernorm": Recipe(("attn_norm",), values=less_one),
    "post_attention_layernorm": (
        Recipe(("post_attention_norm",), values=less_one),
        Recipe(("ffn_norm",), values=less_one),
    ),
    "q_norm": Recipe(("attn_q_norm",), values=less_one),
    "k_norm": Recipe(("attn_k_norm",), values=less_one),
}
_DELTA: Names = _PLUS_ONE | {"linear_attn.norm": "ssm_norm"}
QWEN3_NEXT: Names = _DELTA | {
    "in_proj_qkvz": (Recipe(("attn_qkv", "attn_gate"), rows=_by_key_head), "ssm_in"),
    "in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": Recipe(("ssm_a",), values=log_of_negative),
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.out_proj": "ssm_out",
}
QWEN3_5: Names = _DELTA | {
    "in_proj_qkv": Recipe(("attn_qkv",), rows=_tiled_after_keys),
    "in_proj_z": Recipe(("attn_gate",), rows=_tiled_values),
    "in_proj_a": Recipe(("ssm_alpha",), rows=_tiled_heads),
    "in_proj_b": Recipe(("ssm_beta",), rows=_tiled_heads),
    "linear_attn.conv1d": Recipe(("ssm_conv1d",), rows=_tiled_after_keys),
    "linear_attn.A_log": Recipe(("ssm_a",), values=_heads_in_order),
    "linear_attn.dt_bias": Recipe(("ssm_dt.bias",), rows=_tiled_heads),
    "linear_attn.out_proj": Recipe(("ssm_out",), columns=lambda c: _tiled_values(c).argsort()),
}
LFM2: Names = {
    "embedding_norm": ("token_embd_norm", "output_norm"),
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "q_layernorm": "attn_q_norm",
    "k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "expert_bias": "exp_probs_b.bias",
}
_KIMI: Names = {
    "self_attn.conv1d": Recipe(("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v")),
    "forget_gate.dt_bias": "ssm_dt.bias",
    "b_proj": "ssm_beta",
    "o_norm": "ssm_norm",
}
KIMI: Names = _KIMI | {
    "forget_gate.A_log": Recipe(("ssm_a",), values=log_of_negative),
    "f_a_proj": "ssm_f_a",
    "f_b_proj": "ssm_f_b",
    "g_a_proj": "ssm_g_a",
    "g_b_proj": "ssm_g_b",
}
BAILING: Names = _KIMI | {
    "forget_gate.A_log": Recipe(("ssm_a",), values=_log),
    "f_proj": "ssm_f_a",
    "g_proj": ("ssm_g_a", "attn_gate"),
}

ARCHITECTURES = {
    "qwen3next": Architecture(qwen3_next, QWEN3_NEXT),
    "qwen35moe": Architecture(qwen3_5, QWEN3_5),
    "qwen35": Architecture(qwen3_5_dense, QWEN3_5, may_be_dense=True),
    "lfm2moe": Architecture(lfm2, LFM2),
    "kimi-linear": Architecture(kimi, KIMI),
    "bailingmoe3": Architecture(bailing, BAILING),
}

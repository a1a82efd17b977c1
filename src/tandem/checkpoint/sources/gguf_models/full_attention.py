"""Architectures whose layers all attend in the usual way: Qwen, Mixtral, OLMoE, gpt-oss, GLM."""

import torch
from torch import Tensor

from tandem.checkpoint.config_values import value_of
from tandem.checkpoint.sources.gguf_header import GgufHeader
from tandem.checkpoint.sources.gguf_models.architecture import Architecture, Names, Recipe
from tandem.checkpoint.sources.gguf_models.config_values import (
    config_of,
    head_dim,
    mlp_types,
    num_dense_layers,
    partial_rope,
    routing,
    widths,
)
from tandem.foreign_types import PreTrainedConfig


def qwen2(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Qwen2 with experts."""
    shared = header.rows("blk.0.ffn_gate_shexp.weight")
    return _qwen(header, "qwen2_moe", shared_expert_intermediate_size=shared)


def qwen3(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Qwen3 with experts, or of Qwen3-VL's text model, used for text alone."""
    return _qwen(header, "qwen3_moe", head_dim=head_dim(header), norm_topk_prob=True)


def _qwen(header: GgufHeader, model_type: str, **own: object) -> PreTrainedConfig:
    return config_of(header, model_type, **widths(header), **own)


def minimax_m2(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a MiniMax-M2."""
    rotary = header.value("rope.dimension_count")
    return _with_local_experts(
        header, "minimax_m2", rotary_dim=rotary, rope_parameters=partial_rope(header)
    )


def mixtral(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Mixtral, whose files llama.cpp calls `llama`."""
    return _with_local_experts(header, "mixtral")


def olmoe(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of an OLMoE."""
    return config_of(
        header,
        "olmoe",
        num_experts=header.value("expert_count"),
        intermediate_size=header.expert_width,
        clip_qkv=header.value("attention.clamp_kqv"),
    )


def gpt_oss(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a gpt-oss.

    Transformers' own GGUF reader would lose the scaling of positions.
    """
    window = header.value("attention.sliding_window")
    return _with_local_experts(header, "gpt_oss", sliding_window=window)


def _with_local_experts(header: GgufHeader, model_type: str, **own: object) -> PreTrainedConfig:
    return config_of(
        header,
        model_type,
        num_local_experts=header.value("expert_count"),
        intermediate_size=header.expert_width,
        head_dim=head_dim(header),
        **own,
    )


def glm4(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a GLM-4.5 or later."""
    return config_of(
        header,
        "glm4_moe",
        head_dim=head_dim(header),
        rope_parameters=partial_rope(header),
        use_qk_norm="blk.0.attn_q_norm.weight" in header.tensors,
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        **routing(header),
    )


def ernie(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of an ERNIE 4.5 with experts."""
    return config_of(
        header,
        "ernie4_5_moe",
        ("num_experts_per_tok",),
        moe_k=header.value("expert_used_count"),
        moe_num_shared_experts=header.value("expert_shared_count", 0),
        moe_layer_interval=header.value("interleave_moe_layer_step", 1),
        moe_layer_start_index=num_dense_layers(header),
        use_bias="blk.0.attn_q.bias" in header.tensors,
        **widths(header, "moe_num_experts"),
    )


def hunyuan(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Hunyuan V1 with experts.

    The rotary base in its files already includes the scaling of positions.
    """
    return config_of(
        header,
        "hunyuan_v1_moe",
        ("num_experts_per_tok",),
        moe_topk=header.value("expert_used_count"),
        num_experts=header.value("expert_count"),
        intermediate_size=header.expert_width,
        head_dim=head_dim(header),
    )


def dots1(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a dots.llm1."""
    return config_of(header, "dots1", head_dim=head_dim(header), **routing(header))


def hy_v3(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Hunyuan V3."""
    width = header.value("expert_shared_feed_forward_length", 0)
    return config_of(
        header,
        "hy_v3",
        head_dim=head_dim(header),
        num_shared_experts=width // (header.expert_width or 1),
        router_scaling_factor=header.value("expert_weights_scale", 1.0),
        mlp_layer_types=mlp_types(header),
        **widths(header),
    )


def _pairs(heads: int, width: int) -> Tensor:
    # llama.cpp rotates pairs of neighbours, Transformers the two halves of a head.
    rows = torch.arange(heads * width, device="cpu").view(heads, width // 2, 2)
    return rows.transpose(1, 2).flatten()


def paired(query: str = "q_proj", key: str = "k_proj") -> Names:
    """Return recipes for query and key projections; they undo llama.cpp's reordering of rows."""
    return {
        query: Recipe(("attn_q",), rows=lambda c: _pairs(c.num_attention_heads, _width(c))),
        key: Recipe(("attn_k",), rows=lambda c: _pairs(c.num_key_value_heads, _width(c))),
    }


def _width(config: PreTrainedConfig) -> int:
    return int(value_of(config, "head_dim") or config.hidden_size // config.num_attention_heads)


HUNYUAN: Names = {
    "query_layernorm": "attn_q_norm",
    "key_layernorm": "attn_k_norm",
    "gate.wg": "ffn_gate_inp",
}

ARCHITECTURES = {
    "qwen2moe": Architecture(qwen2),
    "qwen3moe": Architecture(qwen3),
    "minimax-m2": Architecture(minimax_m2),
    "olmoe": Architecture(olmoe),
    "gpt-oss": Architecture(gpt_oss, is_interleaved=True, is_transposed=True),
    "glm4moe": Architecture(glm4),
    "ernie4_5-moe": Architecture(ernie),
    "hunyuan-moe": Architecture(hunyuan, HUNYUAN),
    "qwen3vlmoe": Architecture(qwen3),
    "dots1": Architecture(dots1),
    "hy_v3": Architecture(hy_v3),
}

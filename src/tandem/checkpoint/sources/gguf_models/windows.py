"""Architectures that mix full attention with attention in a window or chunks, such as Gemma 4."""

import numpy as np

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
    llama3_rope,
    mlp_types,
    num_dense_layers,
    num_layers,
    partial_rope,
    rope,
    routing,
    values_of_layers,
    widths,
    windowed_layers,
)
from tandem.core.errors import ModelError, UnsupportedModelError
from tandem.foreign_types import PreTrainedConfig

_SIGMOID = 2  # llama.cpp's number for this way to weigh experts
_STEP35_LIMITS = {
    "swiglu_limits": "swiglu_clamp_exp",
    "swiglu_limits_shared": "swiglu_clamp_shexp",
}


def gemma4(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Gemma 4, with experts or without."""
    windows = each_layer(header, "attention.sliding_window_pattern")
    heads = each_layer(header, "attention.head_count_kv")
    whole = [layer for layer, window in enumerate(windows) if not window]
    shares_keys = any(f"blk.{layer}.attn_v.weight" not in header.tensors for layer in whole)
    return config_of(
        header,
        "gemma4_text",
        ("num_experts_per_tok",),
        layer_types=windowed_layers(windows),
        num_key_value_heads=_first(heads, windows, True),
        num_global_key_value_heads=_first(heads, windows, False),
        head_dim=header.value("attention.key_length_swa"),
        global_head_dim=header.value("attention.key_length"),
        attention_k_eq_v=shares_keys,
        sliding_window=header.value("attention.sliding_window"),
        num_kv_shared_layers=header.value("attention.shared_kv_layers", 0),
        hidden_size_per_layer_input=header.value("embedding_length_per_layer_input", 0),
        vocab_size_per_layer_input=header.rows("token_embd.weight"),
        intermediate_size=min(each_layer(header, "feed_forward_length")),
        final_logit_softcapping=header.value("final_logit_softcapping"),
        **_gemma4_experts(header),
        rope_parameters={
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": _turned_share(header),
                "rope_theta": float(header.value("rope.freq_base", 1e6)),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": float(header.value("rope.freq_base_swa", 1e4)),
            },
        },
    )


def _gemma4_experts(header: GgufHeader) -> dict[str, object]:
    if header.expert_width is None:
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": header.value("expert_count"),
        "top_k_experts": header.value("expert_used_count"),
        "moe_intermediate_size": header.expert_width,
    }


def _first(heads: list[int], windows: list[int], is_window: bool) -> int:
    """Return the number of KV heads of the first layer with (if `is_window`) or without a window.

    If there is no such layer, returns the number of KV heads of layer 0.
    """
    of_kind = (n for n, window in zip(heads, windows, strict=True) if bool(window) == is_window)
    return next(of_kind, heads[0])


def _turned_share(header: GgufHeader) -> float:
    """Return the share of rotary frequencies that full attention uses: those with a factor below 2.

    Without factors in the file, the share is 0.25.
    """
    factors = header.tensors.get("rope_freqs.weight")
    return 0.25 if factors is None else float((factors.data.astype(np.float32) < 2).mean())


def mimo2(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a MiMo V2."""
    windows = each_layer(header, "attention.sliding_window_pattern")
    heads = each_layer(header, "attention.head_count_kv")
    whole = partial_rope(header)
    in_window = whole | {"rope_theta": float(header.value("rope.freq_base_swa", 1e4))}
    return config_of(
        header,
        "mimo_v2_flash",
        layer_types=windowed_layers(windows),
        mlp_layer_types=mlp_types(header),
        num_key_value_heads=_first(heads, windows, False),
        head_dim=head_dim(header),
        v_head_dim=header.value("attention.value_length"),
        sliding_window=header.value("attention.sliding_window"),
        attention_value_scale=header.value("attention.value_scale", 1.0),
        rope_parameters={"full_attention": whole, "sliding_attention": in_window},
        **routing(header),
    )


def exaone(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of an EXAONE with experts."""
    windows = each_layer(header, "attention.sliding_window_pattern")
    values = routing(header)
    values |= {"num_experts": values.pop("n_routed_experts")}
    values |= {"num_shared_experts": values.pop("n_shared_experts")}
    return config_of(
        header,
        "exaone_moe",
        layer_types=windowed_layers(windows),
        mlp_layer_types=mlp_types(header),
        sliding_window=header.value("attention.sliding_window"),
        **values,
    )


def afmoe(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of an AFMoE (Trinity): every fourth layer has full attention."""
    return config_of(
        header,
        "afmoe",
        head_dim=head_dim(header),
        num_shared_experts=header.value("expert_shared_count", 0),
        num_dense_layers=num_dense_layers(header),
        route_scale=header.value("expert_weights_scale", 1.0),
        sliding_window=header.value("attention.sliding_window"),
        global_attn_every_n_layers=4,  # from llama.cpp, like the next: files do not say
        mup_enabled=True,
        **widths(header),
    )


def laguna(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Laguna, whose layers may have different numbers of heads."""
    heads, width = each_layer(header, "attention.head_count"), head_dim(header)
    window = header.value("attention.sliding_window", 0)
    windows = [bool(window and layer % 4) for layer in range(len(heads))]  # files lack the period
    gates = header.rows("blk.0.attn_gate.weight")
    whole = partial_rope(header)
    in_window = {
        "rope_type": "default",
        "rope_theta": float(header.value("rope.freq_base_swa", 1e4)),
        "partial_rotary_factor": header.value("rope.dimension_count_swa", width) / width,
    }
    return config_of(
        header,
        "laguna",
        layer_types=windowed_layers(windows),
        mlp_layer_types=mlp_types(header),
        num_attention_heads=max(heads),
        num_attention_heads_per_layer=heads,
        head_dim=width,
        gating="per-element" if gates == heads[0] * width else "per-head",
        sliding_window=window or None,
        shared_expert_intermediate_size=header.value("expert_shared_feed_forward_length"),
        moe_routed_scaling_factor=header.value("expert_weights_scale", 1.0),
        rope_parameters={"full_attention": whole, "sliding_attention": in_window},
        **widths(header),
    )


def llama4(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Llama 4; values that files lack are llama.cpp's defaults."""
    has_chunks = header.value("attention.sliding_window") != 0
    in_chunks = [has_chunks and layer % 4 != 3 for layer in range(num_layers(header))]
    num_experts = header.value("expert_count")
    return config_of(
        header,
        "llama4_text",
        num_local_experts=num_experts,
        head_dim=head_dim(header),
        intermediate_size=header.expert_width,
        intermediate_size_mlp=header.value("feed_forward_length"),
        interleave_moe_layer_step=header.value("interleave_moe_layer_step"),
        use_qk_norm=num_experts != 128,
        # 1: has rotary embeddings.
        no_rope_layers=[int(chunk or not has_chunks) for chunk in in_chunks],
        layer_types=["chunked_attention" if chunk else "full_attention" for chunk in in_chunks],
        attention_chunk_size=8192,
        floor_scale=8192,
        attn_scale=0.1,
        rope_parameters=llama3_rope(
            header, rope(header), width=head_dim(header), low=1.0, high=1.0, context=8192
        ),
    )


def step35(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Step-3.5, or of the text model of a Step-3.7."""
    if header.value("expert_gating_func", _SIGMOID) != _SIGMOID or not header.value(
        "expert_weights_norm", True
    ):
        raise UnsupportedModelError(
            f"{header.file} weighs experts in another way than Step-3.7, by sigmoids whose sum is "
            "one; Transformers' model has no other"
        )
    kinds = windowed_layers(each_layer(header, "attention.sliding_window_pattern"))
    heads, width = each_layer(header, "attention.head_count"), head_dim(header)
    # Heads of each kind's first layer.
    of_kind = dict(zip(reversed(kinds), reversed(heads), strict=True))
    # Full-attention layers rotate half of what the file says, as in llama.cpp.
    whole = _turned(header, "rope.dimension_count", width) // 2
    in_window = _turned(header, "rope.dimension_count_swa", 2 * whole)
    scaled = llama3_rope(header, rope(header), width=whole, low=1.0, high=32.0, context=131_072)
    limits = {
        name: [max(limit, 0.0) for limit in values_of_layers(header, key)]
        for name, key in _STEP35_LIMITS.items()
        if header.value(key) is not None
    }
    return config_of(
        header,
        "step3p5",
        layer_types=kinds,
        mlp_layer_types=mlp_types(header),
        num_attention_heads=of_kind.get("full_attention", heads[0]),
        num_sliding_attention_heads=of_kind.get("sliding_attention", heads[0]),
        num_key_value_heads=each_layer(header, "attention.head_count_kv")[0],
        head_dim=width,
        sliding_window=header.value("attention.sliding_window") or None,
        share_expert_dim=header.value("expert_shared_feed_forward_length"),
        moe_router_scaling_factor=header.value("expert_weights_scale") or 1.0,
        rope_parameters={
            "full_attention": scaled | {"partial_rotary_factor": whole / width},
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": float(header.value("rope.freq_base_swa", 1e4)),
                "partial_rotary_factor": in_window / width,
            },
        },
        **limits,
        **widths(header, "n_routed_experts"),
    )


def _turned(header: GgufHeader, key: str, default: int) -> int:
    """Return how many dimensions of a head are rotated; `ModelError` for an impossible number."""
    turned, width = header.value(key, default), head_dim(header)
    if not isinstance(turned, int) or not 0 < turned <= width or turned % 4:
        raise ModelError(
            f"{header.file} says that its {key} is {turned}, expected a multiple of 4 up to "
            f"{width}, the width of a head; download it again"
        )
    return turned


AFMOE: Names = {
    "self_attn.gate_proj": "attn_gate",
    "post_attention_layernorm": "post_attention_norm",
    "pre_mlp_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "router.gate": "ffn_gate_inp",
    "expert_bias": ("exp_probs_b.bias", "exp_probs_b"),
}
LAGUNA: Names = {"g_proj": "attn_gate"}
STEP35: Names = {
    "g_proj": "attn_gate",
    "model.norm": Recipe(("output_norm",), values=less_one),
    "input_layernorm": Recipe(("attn_norm",), values=less_one),
    "post_attention_layernorm": Recipe(("ffn_norm",), values=less_one),
    "q_norm": Recipe(("attn_q_norm",), values=less_one),
    "k_norm": Recipe(("attn_k_norm",), values=less_one),
}
GEMMA4: Names = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "layer_scalar": "layer_output_scale.weight",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
    "embed_tokens_per_layer": "per_layer_token_embd",
}

ARCHITECTURES = {
    "exaone-moe": Architecture(exaone),
    "mimo2": Architecture(mimo2),
    "gemma4": Architecture(gemma4, GEMMA4, may_be_dense=True),
    "afmoe": Architecture(afmoe, AFMOE),
    "laguna": Architecture(laguna, LAGUNA),
    "llama4": Architecture(llama4, is_transposed=True),
    "step35": Architecture(step35, STEP35),
}

"""Architectures with Mamba layers (Jamba, Nemotron-H, Granite 4 H), and Granites without them."""

from tandem.checkpoint.sources.gguf_header import GgufHeader
from tandem.checkpoint.sources.gguf_models.architecture import Architecture, Names, Recipe
from tandem.checkpoint.sources.gguf_models.config_values import (
    config_of,
    each_layer,
    head_dim,
    layer_types,
    routing,
)
from tandem.checkpoint.sources.gguf_models.full_attention import paired
from tandem.checkpoint.sources.gguf_models.linear_attention import log_of_negative
from tandem.core.errors import ModelError
from tandem.foreign_types import PreTrainedConfig


def nemotron_h(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Nemotron-H with experts."""
    heads = header.value("ssm.time_step_rank", 1)
    types = layer_types(
        header, **{"ssm_a": "linear_attention", "ffn_up_exps.weight": "moe", "ffn_up.weight": "mlp"}
    )
    values = routing(header)
    feed_forward = each_layer(header, "feed_forward_length")
    return config_of(
        header,
        "nemotron_h",
        ("num_hidden_layers", "rms_norm_eps", "rope_parameters", "first_k_dense_replace"),
        layers_block_type=types,
        layer_norm_epsilon=header.value("attention.layer_norm_epsilon")
        or header.value("attention.layer_norm_rms_epsilon"),
        num_key_value_heads=max(each_layer(header, "attention.head_count_kv")),
        num_attention_heads=max(each_layer(header, "attention.head_count")),
        head_dim=head_dim(header),
        ssm_state_size=header.value("ssm.state_size"),
        mamba_num_heads=heads,
        mamba_head_dim=header.value("ssm.inner_size", 0) // heads,
        n_groups=header.value("ssm.group_count"),
        conv_kernel=header.value("ssm.conv_kernel"),
        moe_latent_size=header.value("moe_latent_size"),
        moe_shared_expert_intermediate_size=header.value("expert_shared_feed_forward_length"),
        **values | {"intermediate_size": max(feed_forward)},
    )


def jamba(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Jamba; raises `ModelError` if its layers do not alternate regularly."""
    attention = layer_types(header, **{"attn_q.weight": "attention"})
    experts = layer_types(header, **{"ffn_gate_inp.weight": "experts"})
    attention_begin, attention_period = _every(header, attention, "attention")
    experts_begin, experts_period = _every(header, experts, "experts")
    inner = header.value("ssm.inner_size", 0)
    return config_of(
        header,
        "jamba",
        ("rope_parameters",),
        num_key_value_heads=max(each_layer(header, "attention.head_count_kv")),
        intermediate_size=header.value("feed_forward_length"),
        num_experts=header.value("expert_count"),
        attn_layer_offset=attention_begin,
        attn_layer_period=attention_period,
        expert_layer_offset=experts_begin,
        expert_layer_period=experts_period,
        mamba_d_state=header.value("ssm.state_size"),
        mamba_d_conv=header.value("ssm.conv_kernel"),
        mamba_dt_rank=header.value("ssm.time_step_rank"),
        mamba_expand=inner // header.value("embedding_length"),
    )


def _every(header: GgufHeader, types: list[str], kind: str) -> tuple[int, int]:
    """Return the number of the first layer of type `kind`, and the distance between such layers.

    Raises `ModelError` if the distances differ.
    """
    found = [layer for layer, each in enumerate(types) if each == kind] or [0]
    period = found[1] - found[0] if len(found) > 1 else len(types)
    if found != list(range(found[0], len(types), period)) or found[0] >= period:
        raise ModelError(
            f"{header.file} has layers with {kind} at {found}, which no config of a Jamba says; "
            "it is damaged or of another architecture: download it again"
        )
    return found[0], period


def granite_hybrid(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Granite 4 with experts."""
    heads = header.value("ssm.time_step_rank", 1)
    inner = header.value("ssm.inner_size", 0)
    is_turned = header.value("rope.scaling.finetuned", False)
    return config_of(
        header,
        "granitemoehybrid",
        num_key_value_heads=max(each_layer(header, "attention.head_count_kv")),
        num_local_experts=header.value("expert_count"),
        intermediate_size=header.expert_width,
        shared_intermediate_size=header.value("expert_shared_feed_forward_length"),
        layer_types=layer_types(header, ssm_a="linear_attention"),
        position_embedding_type="rope" if is_turned else "nope",
        mamba_n_heads=heads,
        mamba_n_groups=header.value("ssm.group_count"),
        mamba_d_state=header.value("ssm.state_size"),
        mamba_d_conv=header.value("ssm.conv_kernel"),
        mamba_d_head=inner // heads,
        mamba_expand=inner // header.value("embedding_length"),
        **granite_factors(header),
    )


def granite(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Granite with experts and without Mamba layers."""
    shared = header.value("expert_shared_feed_forward_length")
    own = {} if shared is None else {"shared_intermediate_size": shared}
    return config_of(
        header,
        "granitemoe" if shared is None else "granitemoeshared",
        num_local_experts=header.value("expert_count"),
        intermediate_size=header.expert_width,
        **granite_factors(header),
        **own,
    )


def granite_factors(header: GgufHeader) -> dict[str, object]:
    """Return Granite's config fields for scaling embeddings, attention, residuals and logits."""
    return {
        "attention_multiplier": header.value("attention.scale"),
        "embedding_multiplier": header.value("embedding_scale", 1.0),
        "residual_multiplier": header.value("residual_scale", 1.0),
        "logits_scaling": header.value("logit_scale", 1.0),
    }


_MAMBA: Names = {
    "in_proj": "ssm_in",
    "out_proj": "ssm_out",
    "conv1d": "ssm_conv1d",
    "A_log": Recipe(("ssm_a",), values=log_of_negative),
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
}
JAMBA: Names = _MAMBA | {
    "x_proj": "ssm_x",
    "dt_proj": "ssm_dt",
    "dt_layernorm": "ssm_dt_norm",
    "b_layernorm": "ssm_b_norm",
    "c_layernorm": "ssm_c_norm",
    "pre_ff_layernorm": "ffn_norm",
    "final_layernorm": "output_norm",
}
NEMOTRON_H: Names = _MAMBA | {
    "embeddings": "token_embd",
    "norm_f": "output_norm",
    "norm": "attn_norm",
    "mixer.norm": "ssm_norm",
    "mixer.gate": "ffn_gate_inp",
    "fc1_latent_proj": "ffn_latent_down",
    "fc2_latent_proj": "ffn_latent_up",
}
GRANITE_HYBRID: Names = (
    _MAMBA
    | paired()
    | {
        "mamba.norm": "ssm_norm",
        "shared_mlp.input_linear": Recipe(("ffn_gate_shexp", "ffn_up_shexp")),
        "shared_mlp.output_linear": "ffn_down_shexp",
    }
)

ARCHITECTURES = {
    "nemotron_h_moe": Architecture(nemotron_h, NEMOTRON_H),
    "jamba": Architecture(jamba, JAMBA),
    "granitehybrid": Architecture(granite_hybrid, GRANITE_HYBRID),
    "granitemoe": Architecture(granite, GRANITE_HYBRID),
}

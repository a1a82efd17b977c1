"""Architectures of GGUF files without experts: Qwen, Llama and Mistral, Gemma 3."""

from tandem.checkpoint.sources.gguf_header import GgufHeader
from tandem.checkpoint.sources.gguf_models.architecture import (
    Architecture,
    Names,
    Recipe,
    less_one,
)
from tandem.checkpoint.sources.gguf_models.config_values import (
    config_of,
    head_dim,
    llama3_rope,
    num_layers,
    rope,
    windowed_layers,
)
from tandem.checkpoint.sources.gguf_models.full_attention import mixtral, paired
from tandem.foreign_types import PreTrainedConfig

_GEMMA3_PERIOD = 6  # if the file does not say: one layer in so many has full attention
_GEMMA3_27B_LAYERS = 62  # only the 27B model scales its attention by another width


def _dense(header: GgufHeader, model_type: str, **own: object) -> PreTrainedConfig:
    width = header.value("feed_forward_length")
    return config_of(header, model_type, ("num_experts_per_tok",), intermediate_size=width, **own)


def qwen2(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Qwen2 or 2.5."""
    return _dense(header, "qwen2")


def qwen3(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Qwen3."""
    return _dense(header, "qwen3", head_dim=head_dim(header))


def llama(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a `llama` file: a Mixtral if it has experts, else a Llama or Mistral."""
    return _llama(header) if header.expert_width is None else mixtral(header)


def _llama(header: GgufHeader) -> PreTrainedConfig:
    width = head_dim(header)
    return _dense(
        header,
        "llama",
        head_dim=width,
        rope_parameters=llama3_rope(
            header, rope(header), width=width, low=1.0, high=4.0, context=8192
        ),
        attention_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_up.bias" in header.tensors,
    )


def mistral3(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Ministral 3, or of a Mistral if the file has no temperature scale."""
    beta = header.value("attention.temperature_scale")
    if beta is None:
        return _llama(header)
    parameters = rope(header)
    # Unlike DeepSeek's files, these hold the multiplier itself. Attention undoes it.
    scale = float(header.value("rope.scaling.yarn_log_multiplier", 1.0))
    parameters |= {"mscale": scale, "mscale_all_dim": scale, "llama_4_scaling_beta": float(beta)}
    return _dense(header, "ministral3", head_dim=head_dim(header), rope_parameters=parameters)


def gemma3(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a Gemma 3's text model."""
    window, width = header.value("attention.sliding_window", 0), head_dim(header)
    period = header.value("attention.sliding_window_pattern", _GEMMA3_PERIOD)
    layers = num_layers(header)
    scaled_by = width
    if layers == _GEMMA3_27B_LAYERS:
        scaled_by = header.value("embedding_length") // header.value("attention.head_count")
    in_window = float(header.value("rope.freq_base_swa", 1e4))
    return _dense(
        header,
        "gemma3_text",
        head_dim=width,
        layer_types=windowed_layers([window and (n + 1) % period for n in range(layers)]),
        sliding_window=window or header.value("context_length"),
        query_pre_attn_scalar=scaled_by,
        final_logit_softcapping=header.value("final_logit_softcapping"),
        rope_parameters={
            "full_attention": rope(header),
            "sliding_attention": {"rope_type": "default", "rope_theta": in_window},
        },
    )


_GEMMA3_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "model.norm": "output_norm",
}
GEMMA3: Names = {name: Recipe((tensor,), values=less_one) for name, tensor in _GEMMA3_NORMS.items()}

ARCHITECTURES = {
    "qwen2": Architecture(qwen2, may_be_dense=True),
    "qwen3": Architecture(qwen3, may_be_dense=True),
    "llama": Architecture(llama, paired(), may_be_dense=True),
    "mistral3": Architecture(mistral3, paired(), may_be_dense=True),
    "gemma3": Architecture(gemma3, GEMMA3, may_be_dense=True),
}

"""The Transformers config of a GGUF file: Transformers' own where it makes one, else made here.

A GGUF file has no config.json; its metadata are the config, under llama.cpp's names.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tandem.checkpoint.sources.gguf_header import GgufHeader
from tandem.core.errors import ModelError
from tandem.foreign_types import PreTrainedConfig

_OPTIONAL = ("clip_qkv", "q_lora_rank")


def by_transformers(header: GgufHeader) -> PreTrainedConfig:
    """Let Transformers make the config; the widths that it leaves at defaults come from tensors."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(header.file.parent, gguf_file=header.file.name)
    if hasattr(config, "moe_intermediate_size"):
        config.moe_intermediate_size = header.expert_width
    else:
        config.intermediate_size = header.expert_width
    # Which tensors there are Transformers sees of the first part of a split model only.
    config.tie_word_embeddings = _is_tied(header)
    shared = header.rows("blk.0.ffn_gate_shexp.weight")
    if shared is not None and hasattr(config, "shared_expert_intermediate_size"):
        config.shared_expert_intermediate_size = shared
    return config


def mixtral(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a `llama` file with experts, which llama.cpp calls no architecture."""
    return _with_local_experts(header, "mixtral")


def olmoe(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of an OLMoE."""
    return _config(
        header,
        "olmoe",
        num_experts=header.value("expert_count"),
        intermediate_size=header.expert_width,
        clip_qkv=header.value("attention.clamp_kqv"),
    )


def gpt_oss(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a gpt-oss; Transformers' own reading loses the scaling of positions."""
    window = header.value("attention.sliding_window")
    return _with_local_experts(header, "gpt_oss", sliding_window=window)


def _with_local_experts(header: GgufHeader, model_type: str, **own: object) -> PreTrainedConfig:
    return _config(
        header,
        model_type,
        num_local_experts=header.value("expert_count"),
        intermediate_size=header.expert_width,
        head_dim=_head_dim(header),
        **own,
    )


def deepseek(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a DeepSeek-V2 or V3, which llama.cpp calls one architecture."""
    is_v3 = any("exp_probs_b" in name for name in header.tensors)
    rope = header.value("rope.dimension_count")
    # Newer files have the latent widths under these names, and those of a head apart.
    key = header.value("attention.key_length_mla") or header.value("attention.key_length")
    value = header.value("attention.value_length_mla") or header.value("attention.value_length")
    groups = header.value("expert_group_count", 1)
    own: dict[str, object] = {
        "num_key_value_heads": header.value("attention.head_count"),
        "num_hidden_layers": header.value("block_count") - header.value("nextn_predict_layers", 0),
        "q_lora_rank": header.value("attention.q_lora_rank"),
        "kv_lora_rank": header.value("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": value,
        "n_routed_experts": header.value("expert_count"),
        "n_shared_experts": header.value("expert_shared_count"),
        "moe_intermediate_size": header.expert_width,
        "intermediate_size": header.value("feed_forward_length"),
        "first_k_dense_replace": header.value("leading_dense_block_count", 0),
        "routed_scaling_factor": header.value("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(header.value("expert_weights_norm", False)),
        "n_group": groups,
        "topk_group": header.value("expert_group_used_count", 1),
    }
    if not is_v3:
        own["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    return _config(header, "deepseek_v3" if is_v3 else "deepseek_v2", **own)


def glm4(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a GLM-4.5 or later."""
    head_dim = _head_dim(header)
    rotary = header.value("rope.dimension_count", head_dim)
    config = _config(
        header,
        "glm4_moe",
        num_hidden_layers=header.value("block_count") - header.value("nextn_predict_layers", 0),
        head_dim=head_dim,
        n_routed_experts=header.value("expert_count"),
        n_shared_experts=header.value("expert_shared_count", 1),
        moe_intermediate_size=header.expert_width,
        intermediate_size=header.value("feed_forward_length"),
        first_k_dense_replace=header.value("leading_dense_block_count", 0),
        routed_scaling_factor=header.value("expert_weights_scale", 1.0),
        norm_topk_prob=bool(header.value("expert_weights_norm", True)),
        n_group=header.value("expert_group_count", 1),
        topk_group=header.value("expert_group_used_count", 1),
        use_qk_norm="blk.0.attn_q_norm.weight" in header.tensors,
        attention_bias="blk.0.attn_q.bias" in header.tensors,
    )
    config.rope_parameters["partial_rotary_factor"] = rotary / head_dim
    return config


def _config(header: GgufHeader, model_type: str, **own: object) -> PreTrainedConfig:
    """Return a config with what all architectures name alike, and `own` values."""
    from transformers import AutoConfig

    values = {
        "hidden_size": header.value("embedding_length"),
        "num_hidden_layers": header.value("block_count"),
        "num_attention_heads": header.value("attention.head_count"),
        "num_key_value_heads": header.value("attention.head_count_kv"),
        "rms_norm_eps": header.value("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": header.value("context_length"),
        "num_experts_per_tok": header.value("expert_used_count"),
        "vocab_size": header.rows("token_embd.weight"),
        **own,
    }
    lacking = [name for name, value in values.items() if value is None and name not in _OPTIONAL]
    if lacking:
        raise ModelError(
            f"{header.file} does not say its {lacking[0]} (architecture {header.architecture!r}); "
            "the file is damaged or was made by an old converter: download it again"
        )
    return AutoConfig.for_model(
        model_type,
        **values,
        rope_parameters=_rope(header),
        tie_word_embeddings=_is_tied(header),
        bos_token_id=header.at("tokenizer.ggml.bos_token_id"),
        eos_token_id=header.at("tokenizer.ggml.eos_token_id"),
        pad_token_id=header.at("tokenizer.ggml.padding_token_id"),
    )


def _is_tied(header: GgufHeader) -> bool:
    return "output.weight" not in header.tensors


def _head_dim(header: GgufHeader) -> int:
    length = header.value("attention.key_length") or header.value("rope.dimension_count")
    if length is None:
        length = header.value("embedding_length") // header.value("attention.head_count")
    return int(length)


def _rope(header: GgufHeader) -> dict[str, object]:
    """Return the rotary embedding's parameters."""
    parameters = {"rope_type": "default", "rope_theta": float(header.value("rope.freq_base", 1e4))}
    kind = header.value("rope.scaling.type", "none")
    if kind == "none":
        return parameters
    if kind not in ("yarn", "linear"):
        raise ModelError(
            f"{header.file} scales its positions by {kind!r}, which Tandem does not read from "
            "GGUF; use the model's safetensors instead"
        )
    parameters |= {"rope_type": kind, "factor": float(header.value("rope.scaling.factor", 1.0))}
    if kind == "yarn":
        parameters |= {
            "original_max_position_embeddings": header.value(
                "rope.scaling.original_context_length"
            ),
            "beta_fast": float(header.value("rope.scaling.yarn_beta_fast", 32.0)),
            "beta_slow": float(header.value("rope.scaling.yarn_beta_slow", 1.0)),
            "truncate": header.architecture != "gpt-oss",  # as its authors have it
        }
    multiplier = header.value("rope.scaling.yarn_log_multiplier")
    if kind == "yarn" and multiplier is not None:  # of the attention's scale, in DeepSeek's models
        parameters |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * float(multiplier))
    return parameters


@dataclass(frozen=True, slots=True)
class Architecture:
    """How files of one architecture become a Transformers model."""

    config: Callable[[GgufHeader], PreTrainedConfig]
    names: str = "qwen2moe"
    """Which of Transformers' processors knows the names of the experts' tensors."""
    has_ordered_heads: bool = False
    """Whether llama.cpp reorders the rows of queries and keys."""
    is_interleaved: bool = False
    """Whether Transformers keeps gate and up row by row in turn, and experts' matrices turned."""


# By `general.architecture`. llama.cpp only renames these, but for the rows listed above.
ARCHITECTURES = {
    "qwen2moe": Architecture(by_transformers),
    "qwen3moe": Architecture(by_transformers, names="qwen3moe"),
    "minimax-m2": Architecture(by_transformers, names="minimax-m2"),
    "llama": Architecture(mixtral, has_ordered_heads=True),
    "olmoe": Architecture(olmoe),
    "gpt-oss": Architecture(gpt_oss, is_interleaved=True),
    "deepseek2": Architecture(deepseek),
    "glm4moe": Architecture(glm4),
}

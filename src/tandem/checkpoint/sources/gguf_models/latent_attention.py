"""Architectures with latent attention, with or without indexers: DeepSeek and GLM."""

from tandem.checkpoint.sources.gguf_header import GgufHeader
from tandem.checkpoint.sources.gguf_models.architecture import Architecture, Names
from tandem.checkpoint.sources.gguf_models.config_values import (
    config_of,
    mlp_types,
    num_layers,
    routing,
)
from tandem.foreign_types import PreTrainedConfig


def deepseek(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a DeepSeek-V2 or V3, which share one architecture in llama.cpp."""
    is_v3 = any("exp_probs_b" in name for name in header.tensors)
    values = latents(header) | routing(header)
    values["norm_topk_prob"] = bool(header.value("expert_weights_norm", False))
    if not is_v3:
        several = header.value("expert_group_count", 1) > 1
        values["topk_method"] = "group_limited_greedy" if several else "greedy"
    return config_of(header, "deepseek_v3" if is_v3 else "deepseek_v2", **values)


def latents(header: GgufHeader) -> dict[str, object]:
    """Return latent attention's config fields: number of heads, widths of latents and of heads."""
    rotary = header.value("rope.dimension_count")
    # Newer files have the widths of the latent here, and those of a head under names of their own.
    key = header.value("attention.key_length_mla") or header.value("attention.key_length")
    value = header.value("attention.value_length_mla") or header.value("attention.value_length")
    return {
        "num_key_value_heads": header.value("attention.head_count"),
        "q_lora_rank": header.value("attention.q_lora_rank"),
        "kv_lora_rank": header.value("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": value,
    }


def deepseek_v32(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a DeepSeek-V3.2."""
    return config_of(header, "deepseek_v32", **_indexed(header))


def glm_dsa(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a GLM-5."""
    types = header.value("attention.indexer.types")
    own = _indexed(header)
    if types is not None:
        kinds = ["full" if is_full else "shared" for is_full in types]
        own["indexer_types"] = kinds[: num_layers(header)]
    return config_of(header, "glm_moe_dsa", **own)


def _indexed(header: GgufHeader) -> dict[str, object]:
    return {
        **latents(header),
        **routing(header),
        "mlp_layer_types": mlp_types(header),
        "index_n_heads": header.value("attention.indexer.head_count"),
        "index_head_dim": header.value("attention.indexer.key_length"),
        "index_topk": header.value("attention.indexer.top_k"),
    }


INDEXED: Names = {
    "indexer.wq_b": "indexer.attn_q_b",
    "indexer.wk": "indexer.attn_k",
    "indexer.k_norm": "indexer.k_norm",
    "indexer.weights_proj": "indexer.proj",
}

ARCHITECTURES = {
    "deepseek2": Architecture(deepseek),
    "deepseek32": Architecture(deepseek_v32, INDEXED),
    "glm-dsa": Architecture(glm_dsa, INDEXED),
}

"""The shapes of released models, from their config.json, to be filled with random weights."""

from dataclasses import dataclass, field
from typing import Any

from tandem.core.errors import ConfigError
from tandem.core.registry import nearest_names


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Transformers architecture and the values of its configuration that decide the speed."""

    model_type: str
    values: dict[str, Any] = field(default_factory=dict)


MODEL_SHAPES = {
    "qwen3-30b-a3b": ModelShape(
        "qwen3_moe",
        {
            "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
            "norm_topk_prob": True, "vocab_size": 151_936, "max_position_embeddings": 40_960,
        },
    ),
    "mixtral-8x7b": ModelShape(
        "mixtral",
        {
            "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
            "intermediate_size": 14_336, "sliding_window": None, "vocab_size": 32_000,
            "max_position_embeddings": 32_768,
        },
    ),
    "deepseek-v2-lite": ModelShape(
        "deepseek_v2",
        {
            "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
            "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
            "n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False,
            "moe_intermediate_size": 1408, "intermediate_size": 10_944,
            "first_k_dense_replace": 1, "vocab_size": 102_400, "max_position_embeddings": 163_840,
        },
    ),
    "gpt-oss-20b": ModelShape(
        "gpt_oss",
        {
            "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
            "num_experts_per_tok": 4, "intermediate_size": 2880, "sliding_window": 128,
            "vocab_size": 201_088, "max_position_embeddings": 131_072,
        },
    ),
    "olmoe": ModelShape(
        "olmoe",
        {
            "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
            "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
            "intermediate_size": 1024, "vocab_size": 50_304, "max_position_embeddings": 4096,
        },
    ),
}  # fmt: skip


def find_shape(name: str) -> ModelShape:
    """Return a shape by its name; `ConfigError` with the nearest names else."""
    if name not in MODEL_SHAPES:
        raise ConfigError(f"unknown shape {name!r}; {nearest_names(name, list(MODEL_SHAPES))}")
    return MODEL_SHAPES[name]

"""The shapes of released models, from their config.json files, for models of random weights."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.core.errors import ConfigError
from tandem.core.registry import nearest_names


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Transformers architecture with the config values that determine its speed."""

    model_type: str
    values: dict[str, Any] = field(default_factory=dict)
    whole: str = ""
    """The type of the whole model, if Transformers cannot build its text model alone."""
    whole_values: dict[str, Any] = field(default_factory=dict)
    """Further values for the config of `whole`; without any, its vision and audio towers are
    removed."""

    def cut(self, num_layers: int, *, first: int = 0) -> "ModelShape":
        """Return the shape with only `num_layers` of its layers, from layer `first` on."""
        total = self.values["num_hidden_layers"]
        end = min(first + num_layers, total)
        values = {
            key: value[first:end] if _is_by_layer(value, total) else value
            for key, value in self.values.items()
        }
        if "per_layer_config" in values:  # overrides, keyed by layer number
            own = {int(layer) - first: one for layer, one in values["per_layer_config"].items()}
            values["per_layer_config"] = {n: one for n, one in own.items() if 0 <= n < end - first}
        return replace(self, values=values | {"num_hidden_layers": end - first})

    @property
    def has_experts(self) -> bool:
        """Whether the shape has experts."""
        return any("expert" in key for key in self.values)

    @property
    def kinds(self) -> list[tuple[object, ...]]:
        """Each layer's kind: its values in the config's per-layer lists."""
        total = self.values["num_hidden_layers"]
        lists = [value for value in self.values.values() if _is_by_layer(value, total)]
        return list(zip(*lists, strict=True)) if lists else [()] * total

    def sample(self, num_layers: int) -> "ModelShape":
        """Return the shape cut to `num_layers` consecutive layers of as many `kinds` as possible.

        Among such ranges, the one with the whole model's most frequent kinds is taken.
        """
        kinds = self.kinds
        counts = Counter(kinds)

        def mixture(start: int) -> tuple[int, int, int]:
            run = kinds[start : start + num_layers]
            found = set(run)
            return len(found), sum(counts[x] for x in found), sum(counts[x] for x in run)

        starts = range(max(0, len(kinds) - num_layers) + 1)
        return self.cut(num_layers, first=max(starts, key=mixture))


def _is_by_layer(value: object, num_layers: int) -> bool:
    return isinstance(value, list) and len(value) == num_layers


def _every(period: int, num_layers: int, others: str) -> list[str]:
    """Return layer types: full attention in every `period`-th layer, `others` elsewhere."""
    return [others if layer % period else "full_attention" for layer in range(1, num_layers + 1)]


# Nemotron 3 Nano's layer types: Mamba-2, experts, attention.
_NEMOTRON_LAYERS = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
_NEMOTRON_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_LFM2_ATTENTION = (2, 6, 10, 14, 18, 21)  # the other layers of LFM2-8B-A1B are convolutions
# DeepSeek-V4-Flash's layers: two windows, then compressed keys with ratios of 4 and 128
# alternately.
_DEEPSEEK_V4_LAYERS = [
    *["sliding_attention"] * 2,
    *["compressed_sparse_attention", "heavily_compressed_attention"] * 20,
    "compressed_sparse_attention",
]

# Values that differ from the defaults of the architecture's configuration class are those of the
# released model's config.json.
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
    "deepseek-v4-flash": ModelShape(
        "deepseek_v4",
        {
            "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64,
            "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 1024, "o_lora_rank": 1024,
            "o_groups": 8, "layer_types": _DEEPSEEK_V4_LAYERS,
            "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40, "sliding_window": 128,
            "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "hc_mult": 4,
            "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6,
            "moe_intermediate_size": 2048, "vocab_size": 129_280,
            "max_position_embeddings": 1_048_576,
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
    "qwen3.6-35b-a3b": ModelShape(
        "qwen3_5_moe_text",
        {
            "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 256,
            "layer_types": _every(4, 40, "linear_attention"), "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 256,
            "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "vocab_size": 248_320,
            "max_position_embeddings": 262_144,
        },
    ),
    "qwen3-next-80b-a3b": ModelShape(
        "qwen3_next",
        {
            "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 256,
            "layer_types": _every(4, 48, "linear_attention"), "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512,
            "num_experts_per_tok": 10, "norm_topk_prob": True, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "vocab_size": 151_936,
            "max_position_embeddings": 262_144,
        },
    ),
    "gemma4-26b-a4b": ModelShape(
        "gemma4_text",
        {
            "hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 256,
            "layer_types": _every(6, 30, "sliding_attention"), "global_head_dim": 512,
            "num_global_key_value_heads": 2, "attention_k_eq_v": True, "sliding_window": 1024,
            "intermediate_size": 2112, "enable_moe_block": True, "num_experts": 128,
            "top_k_experts": 8, "moe_intermediate_size": 704, "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 30.0, "tie_word_embeddings": True, "vocab_size": 262_144,
            "max_position_embeddings": 262_144,
        },
    ),
    "lfm2-8b-a1b": ModelShape(
        "lfm2_moe",
        {
            "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
            "num_key_value_heads": 8, "conv_L_cache": 3, "intermediate_size": 7168,
            "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792, "use_expert_bias": True, "norm_topk_prob": True,
            "layer_types": [
                "full_attention" if layer in _LFM2_ATTENTION else "conv" for layer in range(24)
            ],
            "tie_word_embeddings": True, "vocab_size": 65_536, "max_position_embeddings": 128_000,
        },
    ),
    "nemotron-3-nano": ModelShape(
        "nemotron_h",
        {
            "hidden_size": 2688, "num_hidden_layers": 52, "num_attention_heads": 32,
            "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64,
            "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "n_routed_experts": 128,
            "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712, "intermediate_size": 1856, "n_group": 1,
            "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
            "layers_block_type": [_NEMOTRON_LAYERS[kind] for kind in _NEMOTRON_PATTERN],
            "vocab_size": 131_072, "max_position_embeddings": 262_144,
        },
    ),
    "glm-4.7-flash": ModelShape(
        "glm4_moe_lite",
        {
            "hidden_size": 2048, "num_hidden_layers": 47, "num_attention_heads": 20,
            "num_key_value_heads": 20, "q_lora_rank": 768, "kv_lora_rank": 512,
            "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
            "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 1,
            "topk_group": 1, "routed_scaling_factor": 1.8, "norm_topk_prob": True,
            "moe_intermediate_size": 1536, "intermediate_size": 10_240, "vocab_size": 154_880,
            "max_position_embeddings": 202_752,
        },
    ),
}  # fmt: skip


DENSE_SHAPES = {
    "qwen3-8b": ModelShape(
        "qwen3",
        {
            "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12_288,
            "vocab_size": 151_936, "max_position_embeddings": 40_960,
        },
    ),
}  # fmt: skip


def find_shape(name: str) -> ModelShape:
    """Return a shape by its name; the `ConfigError` for an unknown name lists the known names."""
    shapes = MODEL_SHAPES | DENSE_SHAPES
    if name not in shapes:
        near, known = nearest_names(name, list(shapes)), ", ".join(shapes)
        others = "" if near.startswith("known") else f" known: {known}"
        raise ConfigError(f"unknown shape {name!r}; {near}{others}")
    return shapes[name]

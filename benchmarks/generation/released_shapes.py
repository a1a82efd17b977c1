"""The shapes of released models, one for each architecture that Tandem runs.

Sizes are the defaults of Transformers' config classes (those of the model that the class
documents), or are given here.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from transformers import AutoConfig

from tandem.bench.model_shapes import MODEL_SHAPES, ModelShape
from tandem.core.errors import ConfigError

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NO_SIZES = (
    "model_type", "architectures", "dtype", "transformers_version", "pad_token_id",
    "bos_token_id", "eos_token_id",
)  # fmt: skip
# How many layers come before those with experts: one is enough to be tried.
_FIRST_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


@dataclass(frozen=True, slots=True)
class Released:
    """A released model."""

    name: str
    model_type: str
    """The model type of its text model."""
    values: dict[str, Any] = field(default_factory=dict)
    """Config values that differ from the config class's defaults."""
    whole: str = ""
    """As in `ModelShape`."""
    of_bench: str = ""
    """The shape of `tandem bench` with its sizes."""

    def shape(self) -> ModelShape:
        """Return its sizes, as lists by layer where the config has such."""
        if self.of_bench:
            known = MODEL_SHAPES[self.of_bench]
            return ModelShape(self.model_type, known.values, self.whole)
        config = AutoConfig.for_model(self.model_type, **self.values)
        own_name = config.attribute_map.get("num_hidden_layers")  # which DBRX has
        dropped = {*_NO_SIZES, own_name}
        values = {key: value for key, value in config.to_dict().items() if key not in dropped}
        values["num_hidden_layers"] = config.num_hidden_layers
        values |= {"pad_token_id": 0}  # it may be beyond a smaller vocabulary
        for key in _FIRST_DENSE:
            if values.get(key):
                values[key] = 1
        return ModelShape(self.model_type, values, self.whole)


def with_experts(shape: ModelShape, count: int) -> ModelShape:
    """Return a shape with this many experts per layer; `ConfigError` if it has no such size."""
    named = [name for name in _EXPERTS if name in shape.values]
    if not named:
        raise ConfigError(f"{shape.model_type} does not say how many experts a layer has")
    return replace(shape, values=shape.values | dict.fromkeys(named, count))


def num_experts(shape: ModelShape) -> int:
    """Return the number of experts per layer, 0 if the shape does not say."""
    return next((int(shape.values[name]) for name in _EXPERTS if name in shape.values), 0)


# Of MiniMax-M3's 60 layers the first three are taken to have no experts and full attention.
_MINIMAX_M3 = {
    "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57,
}

# Step's layers: each fourth sees all, the others a window, with more heads.
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_STEP = {
    "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 11 + ["full_attention"],
    "sliding_window": 512,
    "num_sliding_attention_heads": 96,
    "rope_parameters": {
        "full_attention": {**_ROPE, "partial_rotary_factor": 0.5},
        "sliding_attention": _ROPE,
    },
}

RELEASED = {
    "inkling": Released("Inkling", "inkling_text"),
    "minimax_m3_vl": Released("MiniMax-M3", "minimax_m3_vl_text", _MINIMAX_M3),
    "llama4": Released("Llama 4 Scout", "llama4_text"),
    "step3p7": Released("Step-3.7-Flash", "step3p5", _STEP, whole="step3p7"),
    "qwen3_moe": Released("Qwen3-30B-A3B", "qwen3_moe", of_bench="qwen3-30b-a3b"),
    "afmoe": Released("Trinity-Mini", "afmoe"),
    "aria": Released(
        "Aria", "aria_text", {"hidden_size": 2560, "num_hidden_layers": 28, "moe_num_experts": 64,
        "moe_topk": 6, "moe_num_shared_experts": 2, "intermediate_size": 1664,
        "num_attention_heads": 20, "num_key_value_heads": 20, "head_dim": 128},
    ),
    "axk1": Released("A.X-K1", "axk1"),
    "axk2": Released("A.X-K2", "axk2"),
    "bailing_hybrid": Released("Ling-3.0-Flash", "bailing_hybrid"),
    "beam": Released("Beam-1.0", "beam"),
    "cohere2_moe": Released("command-a-plus", "cohere2_moe"),
    "dbrx": Released(
        "DBRX", "dbrx", {"d_model": 6144, "n_heads": 48, "n_layers": 40,
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 500_000.0},
        "ffn_config": {"hidden_size": 6144, "ffn_hidden_size": 10_752, "moe_num_experts": 16,
        "moe_top_k": 4}},
    ),
    "deepseek_v2": Released("DeepSeek-V2-Lite", "deepseek_v2", of_bench="deepseek-v2-lite"),
    "deepseek_v3": Released("DeepSeek-V3", "deepseek_v3"),
    "deepseek_v32": Released("DeepSeek-V3.2", "deepseek_v32"),
    "deepseek_v4": Released("DeepSeek-V4-Flash", "deepseek_v4", of_bench="deepseek-v4-flash"),
    "dots1": Released(
        "dots.llm1", "dots1", {"hidden_size": 4096, "n_routed_experts": 128,
        "num_experts_per_tok": 6, "n_shared_experts": 2},
    ),
    "dots3_note": Released("dots3-note", "dots3_note_text"),
    "ernie4_5_moe": Released("ERNIE-4.5-21B-A3B", "ernie4_5_moe"),
    "exaone_moe": Released(
        "K-EXAONE-236B-A23B", "exaone_moe", {"hidden_size": 6144, "num_hidden_layers": 48,
        "num_experts": 128, "moe_intermediate_size": 2048, "num_attention_heads": 64,
        "num_key_value_heads": 8},
    ),
    "flex_olmo": Released("FlexOlmo-7x7B-1T", "flex_olmo"),
    "flint": Released("flint", "flint", {"mlp_only_layers": [0]}),
    "gemma4": Released("Gemma-4-26B-A4B", "gemma4_text", of_bench="gemma4-26b-a4b"),
    "glm4_moe": Released("GLM-4.5-Air", "glm4_moe"),
    "glm4_moe_lite": Released("GLM-4.7-Flash", "glm4_moe_lite", of_bench="glm-4.7-flash"),
    "glm4v_moe": Released("GLM-4.5V", "glm4v_moe_text", {"head_dim": 128}, whole="glm4v_moe"),
    "glm5_next": Released("GLM-5.3-Flash", "glm5_next_text", whole="glm5_next"),
    "glm_moe_dsa": Released("GLM-5", "glm_moe_dsa"),
    "gpt_oss": Released("gpt-oss-20b", "gpt_oss", of_bench="gpt-oss-20b"),
    "granitemoe": Released(
        "granite-3.1-3b-a800m", "granitemoe", {"hidden_size": 1536, "num_local_experts": 40,
        "num_experts_per_tok": 8, "intermediate_size": 512, "num_attention_heads": 24,
        "num_key_value_heads": 8},
    ),
    "granitemoehybrid": Released(
        "granite-4.0-h-tiny", "granitemoehybrid", {"hidden_size": 1536, "num_hidden_layers": 40,
        "num_local_experts": 64, "num_experts_per_tok": 6, "intermediate_size": 512,
        "shared_intermediate_size": 1024, "num_attention_heads": 12, "num_key_value_heads": 4,
        "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128,
        "layer_types": (["linear_attention"] * 5 + ["full_attention"]
        + ["linear_attention"] * 4) * 4},
    ),
    "hunyuan_v1_moe": Released(
        "Hunyuan-A13B", "hunyuan_v1_moe", {"num_experts": 64, "moe_topk": 8,
        "moe_intermediate_size": 3072, "intermediate_size": 3072, "num_key_value_heads": 8,
        "head_dim": 128},
    ),
    "hy_v3": Released("Hy3-preview", "hy_v3"),
    "hy_v4": Released("Hy4-preview", "hy_v4"),
    "hy_v4_vl": Released("Hy4", "hy_v4_vl_text", whole="hy_v4_vl"),
    "inkling2": Released("Inkling-2-Small", "inkling2_text"),
    "inkling2_loop": Released("Inkling-2-Mini", "inkling2_loop_text"),
    "jamba": Released("Jamba-v0.1", "jamba", {"attn_layer_offset": 1}),  # among the first
    "kimi_linear": Released("Kimi-Linear-48B-A3B", "kimi_linear"),
    "kolibri1": Released("Kolibri-1", "kolibri1"),
    "laguna": Released("Laguna XS.2", "laguna"),
    "lara_mini": Released("Lara-4-Mini", "lara_mini"),
    "lfm2_moe": Released("LFM2-8B-A1B", "lfm2_moe", of_bench="lfm2-8b-a1b"),
    "mellum": Released("Mellum2-12B-A2.5B", "mellum"),
    "mimo_v2_flash": Released("MiMo-V2-Flash", "mimo_v2_flash"),
    "minimax": Released(
        "MiniMax-Text-01", "minimax", {"hidden_size": 6144, "num_hidden_layers": 80,
        "num_local_experts": 32, "intermediate_size": 9216, "num_attention_heads": 64},
    ),
    "minimax_m2": Released("MiniMax-M2", "minimax_m2"),
    "mistral4": Released("Mistral-Small-4", "mistral4", whole="mistral3"),
    "mistral_large4": Released(
        "Mistral-Large-4", "mistral_large4_text", whole="mistral_large4"
    ),
    "mixtral": Released("Mixtral-8x7B", "mixtral", of_bench="mixtral-8x7b"),
    "muse_spark": Released("Muse-Spark-Open", "muse_spark_text", whole="muse_spark"),
    "nemotron_h": Released("Nemotron-3-Nano-30B-A3B", "nemotron_h", of_bench="nemotron-3-nano"),
    "olmoe": Released("OLMoE-1B-7B", "olmoe", of_bench="olmoe"),
    "phimoe": Released("Phi-3.5-MoE", "phimoe"),
    "qwen2_moe": Released("Qwen1.5-MoE-A2.7B", "qwen2_moe"),
    "qwen3_5_moe": Released("Qwen3.6-35B-A3B", "qwen3_5_moe_text", of_bench="qwen3.6-35b-a3b"),
    "qwen3_next": Released("Qwen3-Next-80B-A3B", "qwen3_next", of_bench="qwen3-next-80b-a3b"),
    "qwen3_vl_moe": Released(
        "Qwen3-VL-30B-A3B", "qwen3_vl_moe_text", whole="qwen3_vl_moe", of_bench="qwen3-30b-a3b"
    ),
    "solar_open": Released("Solar-Open-100B", "solar_open"),
    "unlimited_ocr": Released("Unlimited-OCR", "unlimited_ocr_text", whole="unlimited_ocr"),
    "zaya": Released("ZAYA1-8B", "zaya"),
}  # fmt: skip
"""By the architecture's name in Transformers."""

NOT_MEASURED = {
    "deepseek_ocr2": "as DeepSeek-V2-Lite's family, behind images",
    "diffusion_gemma": "it does not write token by token",
    "ernie4_5_vl_moe": "as ERNIE-4.5-21B-A3B, behind images",
    "granitemoe_swa": "as granite-3.1-3b-a800m, with windows",
    "granitemoeshared": "no model of it is released",
    "longcat_flash": "one of its layers takes more than 10 GB",
    "openai_privacy_filter": "it does not write",
    "qwen3_omni_moe": "as Qwen3-30B-A3B, behind images and sound",
    "qwen4_exp": "its config class has no sizes of indexers",
}
"""Architectures without a shape to measure, with the reason."""

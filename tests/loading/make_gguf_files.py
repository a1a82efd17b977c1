"""Writes tiny models by llama.cpp's own converter: the files of `tests/loading/data/gguf`.

    python -m tests.loading.make_gguf_files --source DIR [NAME ...]

DIR is llama.cpp's source, such as `vendor/llama.cpp` of llama-cpp-python's source package. Each
matrix has two values that the file's type stores exactly, so that files compress well (xz) and
Transformers' answers, stored beside them in `expected.safetensors`, are exact.
"""

import argparse
import importlib
import json
import lzma
import math
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.architectures import build_tiny_dense_model, build_tiny_model
from tests.decode.test_mtp_streams import Reference
from tests.loading.deepseek_v4 import NUM_LAYERS, as_released, quantised, released_tensors

DATA = Path(__file__).parent / "data" / "gguf"
EXPECTED = DATA / "expected.safetensors"
TOKENS = [[5, 40, 17, 99, 64, 23, 88, 31, 7, 54]]
# A multiple of 127, so that it is exactly a scale of Q8_0.
WEIGHT = 127 * 2.0**-10
MXFP4_WEIGHT = 2.0**-3
MTP = "deepseek4 mtp"  # the tiny model's MTP layer, in a file of its own


def _half_turned(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}


_SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
_WINDOWS = ["full_attention", *["sliding_attention"] * 3]
_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {_SPARSE: 4, _HEAVY: 8}
_STEP35_SCALING = {
    "rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 131_072,
    "low_freq_factor": 1.0, "high_freq_factor": 32.0,
}  # fmt: skip
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}


# By file: the architecture in Transformers, and its config beside `tests.architectures`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen35moe": ("qwen3_5_moe", {"rope_parameters": _half_turned(1e6) | _SECTIONS}),
    "qwen3next": ("qwen3_next", {}),
    "gemma4": ("gemma4", {
        "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    }),
    "lfm2moe": ("lfm2_moe", {}),
    "nemotron_h_moe": ("nemotron_h", {}),
    "granitehybrid": ("granitemoehybrid", {}),
    "jamba": ("jamba", {}),
    "glm-dsa": ("glm_moe_dsa", {}),
    "deepseek32": ("deepseek_v32", {}),
    "deepseek2 glm": ("glm4_moe_lite", {}),
    "kimi-linear": ("kimi_linear", {"q_lora_rank": None, "n_group": 1}),
    "bailingmoe3": ("bailing_hybrid", {"layer_group_size": 3, "num_mtp_layers": 0}),
    "ernie4_5-moe": ("ernie4_5_moe", {}),
    "hunyuan-moe": ("hunyuan_v1_moe", {}),
    "dots1": ("dots1", {}),
    "hy_v3": ("hy_v3", {}),
    "exaone-moe": ("exaone_moe", {}),
    "granitemoe": ("granitemoe", {
        "attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    }),
    "granitemoe shared": ("granitemoeshared", {}),
    "afmoe": ("afmoe", {"mup_enabled": True, "layer_types": _WINDOWS[1:] + _WINDOWS[:1]}),
    "laguna": ("laguna", {"layer_types": _WINDOWS}),
    "mimo2": ("mimo_v2_flash", {
        "v_head_dim": 8,
        "rope_parameters": {
            "full_attention": _half_turned(5e6), "sliding_attention": _half_turned(1e4),
        },
    }),
    "llama4": ("llama4", {
        "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1,
        "interleave_moe_layer_step": 2, "moe_layers": [1, 3],
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0,
            "high_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        },
    }),
    "step35": ("step3p7", {"text_config": {
        "max_position_embeddings": 262_144, "rope_parameters": {
            "full_attention": _half_turned(5e6) | _STEP35_SCALING,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }}),
    "deepseek4": ("deepseek_v4", {
        "layer_types": ["sliding_attention", _SPARSE, _HEAVY, _SPARSE], "num_hidden_layers": 4,
        "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 2, "compress_rates": _RATES,
        "rope_parameters": {"rope_type": "yarn", **_YARN}, "partial_rotary_factor": 0.5,
        "scoring_func": "sqrtsoftplus",
    }),
}  # fmt: skip

# Likewise of files without experts: the architecture, its class, and its config.
DENSE_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("qwen2", "Qwen2ForCausalLM", {}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {}),
    "llama": ("llama", "LlamaForCausalLM", {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    }),
    "mistral3": ("ministral3", "Ministral3ForCausalLM", {
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, **_YARN, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.1,
        },
    }),
    "gemma3": ("gemma3", "Gemma3ForCausalLM", {
        "num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "query_pre_attn_scalar": 16,
    }),
    "qwen35": ("qwen3_5", "Qwen3_5ForCausalLM", {"rope_parameters": _half_turned(1e6) | _SECTIONS}),
    "gemma4 dense": ("gemma4", "Gemma4ForCausalLM", {
        "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "enable_moe_block": False, "num_experts": None, "top_k_experts": None,
        "moe_intermediate_size": None,
    }),
}  # fmt: skip


def _as_released(config: dict[str, Any]) -> dict[str, Any]:
    """Return config entries of released models that the converter reads and Transformers omits."""
    kinds, layers = config.get("layer_types", []), config.get("num_hidden_layers", 0)
    is_window = [int(kind == "sliding_attention") for kind in kinds]
    is_dense = [kind == "dense" for kind in config.get("mlp_layer_types") or []]
    one_of_each = {"linear_attention": "mamba", "full_attention": "attention"}
    full = [n + 1 for n, kind in enumerate(kinds) if kind == "full_attention"]
    by_sigmoid = {"first_k_dense_replace": sum(is_dense), "scoring_func": "sigmoid"}
    return {
        "glm4_moe_lite": by_sigmoid, "deepseek_v32": by_sigmoid, "glm_moe_dsa": by_sigmoid,
        "granitemoehybrid": {"layer_types": [one_of_each.get(kind) for kind in kinds]},
        "kimi_linear": {
            "linear_attn_config": {
                "full_attn_layers": full, "head_dim": config.get("linear_head_dim"),
                "short_conv_kernel_size": config.get("linear_conv_kernel_dim"),
            },
            "first_k_dense_replace": sum(is_dense), "moe_router_activation_func": "sigmoid",
        },
        "bailing_hybrid": {
            "architectures": ["BailingMoeV3ForCausalLM"], "no_kda_lora": True,
            "model_type": "bailing_moe_v3",
            "gated_attention_proj_granularity_type": "head_wise", "score_function": "sigmoid",
            "moe_shared_expert_intermediate_size": config.get("moe_intermediate_size"),
            "head_dim": config.get("linear_head_dim"), "n_group": 2, "norm_topk_prob": True,
            "max_position_embeddings": 256,
        },
        "mimo_v2_flash": {
            "swa_head_dim": config.get("head_dim"), "swa_v_head_dim": config.get("v_head_dim"),
            "swa_num_attention_heads": config.get("num_attention_heads"),
            "swa_num_key_value_heads": 2 * (config.get("num_key_value_heads") or 0),
            "hybrid_layer_pattern": is_window, "topk_method": "noaux_tc",
            "scoring_func": "sigmoid", "layernorm_epsilon": config.get("rms_norm_eps"),
            "rope_parameters": _half_turned(5e6), "swa_rope_theta": 1e4,
            "model_type": "mimo_v2",
        },
        "deepseek_v4": {
            "compress_ratios": [_RATES.get(kind, 0) for kind in kinds], "qk_rope_head_dim": 8,
            "num_hash_layers": config.get("mlp_layer_types", []).count("hash_moe"),
            "rope_scaling": {"type": "yarn", **_YARN},
        },
        "hunyuan_v1_moe": {
            "moe_intermediate_size": [config.get("intermediate_size")] * layers,
            "num_shared_expert": [1] * layers,
            "moe_topk": [config.get("moe_topk")] * layers,
        },
        "step3p7": {  # of a type that Transformers does not know and would drop
            "model_type": "step3p7_flash",
            "text_config": _step3p5_as_released(config.get("text_config", {})),
        },
    }.get(config["model_type"], {})  # fmt: skip


def _step3p5_as_released(text: dict[str, Any]) -> dict[str, Any]:
    kinds = text.get("layer_types", [])
    in_window = [kind == "sliding_attention" for kind in kinds]
    is_sparse = [kind == "sparse" for kind in text.get("mlp_layer_types", [])]
    rope = text.get("rope_parameters", {})
    return text | {
        "attention_other_setting": {
            "num_attention_heads": text.get("num_sliding_attention_heads"),
            "num_attention_groups": text.get("num_key_value_heads"),
        },
        "num_attention_groups": text.get("num_key_value_heads"),
        "moe_num_experts": text.get("n_routed_experts"),
        "moe_top_k": text.get("num_experts_per_tok"),
        "moe_layers_enum": ",".join(str(n) for n, sparse in enumerate(is_sparse) if sparse),
        "moe_router_activation": "sigmoid", "norm_expert_weight": True,
        "partial_rotary_factors": [1.0 if window else 0.5 for window in in_window],
        "rope_theta": [rope[kind]["rope_theta"] for kind in kinds],
        "rope_scaling": rope.get("full_attention"),
    }  # fmt: skip


def tiny_model(name: str, **more: object) -> Any:
    """Return a file's model in Transformers, with weights that the file's types store exactly."""
    model: Any
    if name in DENSE_MODELS:
        architecture, class_name, values = DENSE_MODELS[name]
        model = build_tiny_dense_model(architecture, class_name=class_name, values=values | more)
    else:
        architecture, values = MODELS[name]
        model = build_tiny_model(architecture, values=values | more)
    weight = MXFP4_WEIGHT if architecture == "deepseek_v4" else WEIGHT
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                signs = torch.randint(0, 2, parameter.shape, generator=random) * 2 - 1
                parameter.copy_(weight * signs)
            elif architecture == "deepseek_v4":  # whose norms are released in bf16
                parameter.copy_(parameter.bfloat16())
    return model


def answers(model: Any) -> Tensor:
    """Return a model's logits for `TOKENS`, in fp32."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor(TOKENS)).logits[0].float()
    return logits


def _vocabulary(self: Any) -> None:
    """Write a vocabulary of 128 words in place of a tokenizer's."""
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"<{i}>" for i in range(4, 128))]
    writer = self.gguf_writer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([3] * 4 + [1] * (len(words) - 4))
    writer.add_token_merges(["< 4"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def tiny_mtp(directory: Path) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tiny DeepSeek-V4's released MTP layer, and its logits for `TOKENS`.

    The values of model and layer are written to a directory.
    """
    values = MODELS["deepseek4"][1]
    kinds = {
        "layer_types": [*values["layer_types"], "sliding_attention"],
        "mlp_layer_types": [*values["mlp_layer_types"], "moe"],
    }
    model = tiny_model("deepseek4")
    longer = tiny_model("deepseek4", num_hidden_layers=NUM_LAYERS + 1, **kinds)
    for part in ("get_input_embeddings", "get_output_embeddings"):
        getattr(longer, part)().load_state_dict(getattr(model, part)().state_dict())
    tensors = released_tensors(directory, longer)
    for name in ("e_proj.weight", "h_proj.weight"):
        tensors[f"mtp.0.{name}"] = WEIGHT * tensors[f"mtp.0.{name}"].sign()
    for name in ("enorm.weight", "hnorm.weight", "norm.weight"):
        tensors[f"mtp.0.{name}"] = tensors[f"mtp.0.{name}"].bfloat16().float()
    save_file(tensors, directory / "model.safetensors")
    reference = Reference(directory)
    logits = reference.logits(reference.made(TOKENS[0], mtp_streams(model.config)))
    return {name: x for name, x in tensors.items() if name.startswith("mtp.")}, logits


def mtp_streams(config: Any) -> Tensor:
    """Return the MTP layer's input for the tokens before `TOKENS`."""
    shape = len(TOKENS[0]), config.hc_mult, config.hidden_size
    return torch.arange(math.prod(shape)).float().sin().view(shape)


def convert(model: Any, file: Path, source: Path, mtp: Mapping[str, Tensor] | None = None) -> None:
    """Run llama.cpp's converter for Q8_0; DeepSeek-V4's experts become MXFP4.

    With an MTP layer, only that layer is converted.
    """
    sys.path[:0] = [str(source / "gguf-py"), str(source)]
    gguf = importlib.import_module("gguf")
    conversion = importlib.import_module("conversion")
    base = importlib.import_module("conversion.base")
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        model.save_pretrained(directory)
        (Path(directory) / "tokenizer.json").write_text(
            '{"model": {"vocab": {' + ",".join(f'"{i}": {i}' for i in range(128)) + "}},"
            ' "added_tokens": []}'
        )
        _write_as_released(Path(directory), mtp or {})
        values = base.ModelBase.load_hparams(Path(directory), False)
        kind = conversion.get_model_class(base.get_model_architecture(values, base.ModelType.TEXT))
        kind = getattr(kind, "Ministral3Model", kind)  # which one for several hands all on to
        kind.set_vocab = _vocabulary
        kind.no_mtp, kind.mtp_only = mtp is None, mtp is not None
        kind(Path(directory), gguf.LlamaFileType.MOSTLY_Q8_0, file, eager=True).write()


def _write_as_released(directory: Path, mtp: Mapping[str, Tensor]) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    released = config | _as_released(config)
    if mtp:
        released["num_nextn_predict_layers"] = 1
        released["compress_ratios"].append(0)
    file.write_text(json.dumps(released))
    # Transformers writes Kimi's dense layers under the name of those with experts.
    weights = load_file(directory / "model.safetensors")
    pattern = re.compile(r"block_sparse_moe\.(gate|up|down)_proj")
    renamed = {pattern.sub(r"mlp.\1_proj", name): weight for name, weight in weights.items()}
    if config["model_type"] == "deepseek_v4":
        renamed = quantised({**as_released(renamed), **mtp}, is_all=False)
    save_file(renamed, directory / "model.safetensors")


def main() -> None:
    """Write the named files, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*MODELS, *DENSE_MODELS, MTP])
    parser.add_argument("--source", type=Path, required=True)
    arguments = parser.parse_args()
    DATA.mkdir(exist_ok=True)
    expected = load_file(EXPECTED) if EXPECTED.exists() else {}
    for name in arguments.names:
        mtp, model = None, tiny_model("deepseek4" if name == MTP else name)
        with tempfile.TemporaryDirectory() as directory:
            if name == MTP:
                mtp, expected[name] = tiny_mtp(Path(directory) / "longer")
            else:
                expected[name] = answers(model)
            file = Path(directory) / "model.gguf"
            convert(model, file, arguments.source, mtp)
            packed = lzma.compress(file.read_bytes(), preset=9 | lzma.PRESET_EXTREME)
        (DATA / f"{name}.gguf.xz").write_bytes(packed)
        print(f"{name}: {len(packed)} bytes")
    save_file(dict(sorted(expected.items())), EXPECTED)


if __name__ == "__main__":
    main()

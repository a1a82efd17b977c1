"""Tiny random models of every architecture of the installed Transformers with fused experts.

No architecture is listed here. They are found in Transformers and among Tandem's adapters, and one
table of small sizes (SIZES) replaces the values in each default configuration.
"""

import functools
import importlib
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from _pytest.mark import ParameterSet
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

from tandem.hf.adapters import ADAPTERS, adapter_of
from tandem.hf.compat import cache_argument

NEWEST = (5, 23)
"""The Transformers that what is kept of steps was written on."""
IS_OLDER = tuple(map(int, transformers.__version__.split(".")[:2])) < NEWEST

VOCABULARY = 128
FIRST_PLAIN_TOKEN = 32  # ids below are for the special tokens of SIZES
PROMPT_LENGTH = 7
MAX_LAYERS = 4
EXPERTS = 8
TOP_K = 2
# One of each kind of attention, state, router, expert and residual; `make test-slow` tries all
# that `by_kind` leaves out.
KINDS = {
    "aria", "dbrx", "deepseek_v3", "deepseek_v4", "diffusion_gemma", "ernie4_5_vl_moe", "gemma4",
    "glm5_next", "gpt_oss", "granitemoehybrid", "hy_v4", "inkling", "jamba", "kimi_linear",
    "lfm2_moe", "llama4", "longcat_flash", "minimax", "minimax_m3_vl", "mixtral", "muse_spark",
    "nemotron_h", "openai_privacy_filter", "phimoe", "qwen3_next", "qwen3_vl_moe", "qwen4_exp",
    "step3p7", "zaya",
}  # fmt: skip
LAYER_GAIN = 0.7
ROUTER_GAIN = 1.5

# The values of configuration keys, wherever they occur. Widths that reach expert weights
# are multiples of 32, the group of the quantised formats.
SIZES: dict[str, Any] = {
    # text
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "swa_num_attention_heads": 4,
    "num_attention_heads_per_layer": 4,
    "head_dim": 16,
    "swa_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "sliding_window": 4,  # shorter than the prompt, so that the window matters
    "sliding_window_size": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "logit_scale": 1.0,  # a head that shrinks its logits would hide differences
    "logits_mup_width_multiplier": 1.0,
    "output_multiplier": 1.0,
    "qk_scale_factor": 1.0,  # sharp attention would magnify rounding
    # feed-forward and experts
    "intermediate_size": 64,
    "dense_intermediate_size": 64,
    "prefix_dense_intermediate_size": 64,
    "moe_intermediate_size": 32,
    "moe_hidden_size": 32,
    "moe_latent_size": 32,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "router_hidden_size": 16,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_experts_per_token": TOP_K,
    "top_k_experts": TOP_K,
    "moe_topk": TOP_K,
    "moe_k": TOP_K,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "enable_moe_block": True,
    "swiglu_limit": 0.5,  # small enough to be reached
    "mlp_gate_softcap": 0.5,
    "mlp_up_softcap": 0.5,
    # the layers with experts, where a rule gives them and not a list
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": MAX_LAYERS - 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    # latent and indexed attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 16,  # few heads would often give several tokens the score zero
    "index_topk": 4,
    "index_kpool": 2,
    "index_block_size": 2,
    "index_topk_blocks": 2,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "rotary_dim": 8,
    # linear attention and state spaces
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_chunk_size": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_dt_rank": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 4,
    "block_size": 4,
    # hyper-connections, gated norms, n-gram embeddings, diffusion
    "hc_lowrank": 16,
    "gated_norm_rank": 8,
    "ngram_vocab_size_base": 64,
    "ple_embed_dim": 32,
    "split_ngram_parts": 4,
    "canvas_length": 8,
    # layers that run twice
    "n_layers_per_attn_res_block": 1,
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 3,
    "loop_num_passes": 2,  # more would magnify rounding
    "loop_gate_rank": 8,
    # towers for images and sound: present, never run
    "num_heads": 4,
    "image_size": 64,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "deepstack_visual_indexes": 0,
    "projection_intermediate_size": 32,
    "projector_hidden_size": 32,
    "mlp_dim": 64,
    "output_channels": 16,
    "downsample_channels": 16,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "d_model": 64,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "downsample_hidden_size": 16,
    "output_dim": 64,
    "num_mel_bins": 16,
    "feature_size": 16,
    "hidden_sizes": 16,
    "depths": 1,
    "depth": 1,
}

_VISION = ("hidden_size", "intermediate_size", "num_attention_heads", "position_embedding_size")
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}

# Additional values of one kind of configuration, by model_type.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    # The default layers are of one kind, or not given; released models have these.
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_n_heads": 2,  # one for each KV head
    },
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    # The sections of the rotary embedding must add up to half of the rotated width.
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]},
        "moe_intermediate_size": [64, 32],  # experts for text, experts for images
    },
    "glm4v_moe_text": {
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    },
    "hy_v4_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
    # Transformers 5.17 has no default for a tower that the model requires.
    "diffusion_gemma": {
        "vision_config": {
            **{key: SIZES[key] for key in _VISION},
            "model_type": "gemma4_vision",
            "num_hidden_layers": 1,
            "num_key_value_heads": SIZES["num_attention_heads"],
        }
    },
    # Sizes of some layers that are not keys of their own.
    "diffusion_gemma_text": {"global_head_dim": 16},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 24},
    "gemma4_text": {"global_head_dim": 16},
    "qwen4_exp_text": {"ple_layer_ids": [1, 3]},  # embeddings of n-grams, as the released model
    # The configuration class refuses anything else.
    "glm5_next_text": {"qk_rope_head_dim": 0, "head_dim": 0},
    "zaya": {"num_experts_per_tok": 1},
    "dbrx": {
        "n_heads": 4,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10_000.0},
        "ffn_config": {
            "hidden_size": 64,
            "ffn_hidden_size": 32,
            "moe_num_experts": EXPERTS,
            "moe_top_k": TOP_K,
        },
    },
    # Two chunks of a prompt, and temperatures that grow within it.
    "llama4_text": {
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 64,
        "attention_chunk_size": 4,
        "floor_scale": 4,
        "attn_scale": 0.5,
    },
    "longcat_flash": {
        "num_layers": 2,  # with two attentions each
        "head_dim": 8,
        "expert_ffn_hidden_size": 32,
        "ffn_hidden_size": 64,
        "zero_expert_num": 4,
        "routed_scaling_factor": 1.5,
    },
    "step3p5": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "swiglu_limits": [None, None, 0.3, 0.3],
        "swiglu_limits_shared": [None, None, None, 0.3],
        "share_expert_dim": 32,
        "num_sliding_attention_heads": 8,
        "moe_router_scaling_factor": 1.5,
        "rope_parameters": {
            "full_attention": {**_ROPE, "partial_rotary_factor": 0.5},
            "sliding_attention": _ROPE,
        },
    },
    "llama4_vision_model": dict.fromkeys(
        ("vision_output_dim", "projector_input_dim", "projector_output_dim"), 64
    ),
}


@functools.cache
def architectures() -> list[str]:
    """Return the names of the model folders of Transformers whose experts Tandem computes."""
    models = Path(transformers.__file__).parent / "models"
    sources = {
        path.parent.name: path.read_text(encoding="utf-8")
        for path in sorted(models.glob("*/modeling_*.py"))
    }
    on_it = {name for name, text in sources.items() if "@use_experts_implementation" in text}
    return sorted(on_it | {name for name in adapted() if name in sources})


def adapted() -> set[str]:
    """Return the names of the model folders whose experts use the interface through an adapter."""
    return {name.partition(".")[0] for name in ADAPTERS}


def experts_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose forward goes through the experts interface."""
    marks = ("has_gate", "has_bias", "is_transposed")
    return [module for module in model.modules() if all(hasattr(module, mark) for mark in marks)]


def experts_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that compute experts: experts modules, or an adapter's replacements."""
    blocks = [
        module
        for module in model.modules()
        if isinstance(adapter_of(type(module)), type) or type(module) in ADAPTERS.values()
    ]
    return blocks or experts_modules(model)


def build_tiny_dense_model(
    name: str, *, class_name: str = "", values: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """Build a random model of an architecture without experts, as `build_tiny_model` does."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        of_name = (kind for kind in _model_classes(name) if class_name in ("", kind.__name__))
        model_class = next(of_name)
        model = model_class(_tiny_config(model_class, values or {}))
        _draw_weights(model)
        return model.eval()


def build_tiny_model(
    name: str, seed: int = 0, *, class_name: str = "", values: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """Build a random fp32 model of architecture `name` whose experts influence the output; eval
    mode.

    `class_name` selects another class than the usual one; `values` override config values.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for model_class in _model_classes(name):
            if class_name not in ("", model_class.__name__):
                continue
            model = model_class(_tiny_config(model_class, values or {}))
            if experts_blocks(model):
                _draw_weights(model)
                model.train(False)
                return model
    raise LookupError(f"no model class of {name} holds experts that use the interface")


def takes_cache(model: PreTrainedModel) -> bool:
    """Tell whether the model decodes with a key/value cache; encoders do not."""
    return model.can_generate() or "decoder_input_ids" in _forward_arguments(model)


def tiny_inputs(model: PreTrainedModel) -> dict[str, Any]:
    """Return a prompt of plain text tokens: two sequences of seven."""
    inputs: dict[str, Any] = {"input_ids": _plain_tokens(PROMPT_LENGTH)}
    if "decoder_input_ids" in _forward_arguments(model):  # diffusion draws its canvas at random
        inputs["decoder_input_ids"] = _plain_tokens(SIZES["canvas_length"])
    if takes_cache(model):
        inputs["use_cache"] = True
    return inputs


def next_inputs(model: PreTrainedModel, outputs: ModelOutput) -> dict[str, Any]:
    """Return the inputs of the step after a prompt: one token or one canvas, and the cache."""
    name = cache_argument(model)
    step: dict[str, Any] = {name: outputs[name], "use_cache": True}
    if "decoder_input_ids" in _forward_arguments(model):
        return {"decoder_input_ids": _plain_tokens(SIZES["canvas_length"] + 1)[:, 1:], **step}
    return {"input_ids": _plain_tokens(PROMPT_LENGTH + 1)[:, -1:], **step}


def result_of(outputs: ModelOutput) -> Tensor:
    """Return the tensor that tests compare: logits, or hidden states of a model without a head."""
    result: Tensor = outputs["logits" if "logits" in outputs else "last_hidden_state"]
    return result


def _forward_arguments(model: PreTrainedModel) -> Iterable[str]:
    return inspect.signature(model.forward).parameters


def _plain_tokens(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(FIRST_PLAIN_TOKEN, VOCABULARY, (2, length), generator=generator)


def _model_classes(name: str) -> list[type[PreTrainedModel]]:
    """List the architecture's model classes, the most useful kind of head first."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    heads = ("ForCausalLM", "ForConditionalGeneration", "For", "")
    found = [value for value in vars(module).values() if _is_model_class(value, module.__name__)]
    by_head = [cls for head in heads for cls in found if head in cls.__name__]
    return list(dict.fromkeys(by_head))


def by_kind(names: Iterable[str]) -> list[ParameterSet]:
    """Return a test's architectures; those similar to another one are left to `test-slow`."""
    slow = pytest.mark.slow
    return [pytest.param(name, marks=() if name in KINDS else slow) for name in sorted(names)]


def _is_model_class(value: object, module_name: str) -> bool:
    return (
        isinstance(value, type)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == module_name
        and "PreTrainedModel" not in value.__name__
    )


def _tiny_config(model_class: type[PreTrainedModel], more: Mapping[str, Any]) -> PreTrainedConfig:
    config_class = model_class.config_class
    assert config_class is not None
    tiny = _tiny_values(config_class())
    parts = {
        name: tiny[name] | value
        for name, value in more.items()
        if name.endswith("_config") and name in tiny  # of a model with a tower
    }
    return config_class(**tiny | dict(more) | parts)


def _tiny_values(default: PreTrainedConfig) -> dict[str, Any]:
    """Replace the sizes in a default configuration, and in nested ones, by those of SIZES."""
    values: dict[str, Any] = {}
    stored = vars(default)  # getattr refuses keys that vary by layer
    layers = _layers_to_keep(default)
    for field in fields(default):
        value: Any = stored.get(_stored_name(default, field.name))
        if isinstance(value, PreTrainedConfig):
            values[field.name] = {**_tiny_values(value), "model_type": value.model_type}
        elif field.name == _stored_name(default, "num_hidden_layers"):
            values[field.name] = len(layers)
        elif field.name in SIZES:
            values[field.name] = _like(value, SIZES[field.name], layers)
        elif _is_per_layer(default, value):
            values[field.name] = [value[layer] for layer in layers]
    for prefix in ("num", "swa_num"):
        values |= _key_value_heads(stored, values, prefix)
    return values | EXCEPTIONS.get(default.model_type, {})


def _stored_name(config: PreTrainedConfig, key: str) -> str:
    return config.attribute_map.get(key, key)


def _like(default: object, size: Any, layers: list[int]) -> Any:
    """Repeat a size where the default is a list: one number per layer or per part."""
    if not isinstance(default, list | tuple):
        return size
    return [size] * min(len(default), max(len(layers), 1))


def _key_value_heads(stored: dict[str, Any], values: dict[str, Any], prefix: str) -> dict[str, int]:
    """Return the number of key/value heads: all, half or one of the query heads."""
    queries, keys = f"{prefix}_attention_heads", f"{prefix}_key_value_heads"
    if stored.get(keys) is None or queries not in stored:
        return {}
    if stored[keys] == stored[queries]:
        return {keys: values[queries]}
    return {keys: min(stored[keys], values[queries] // 2)}


def _is_per_layer(config: PreTrainedConfig, value: object) -> bool:
    layers = getattr(config, "num_hidden_layers", None)
    return isinstance(value, list | tuple) and len(value) == layers


def _layers_to_keep(config: PreTrainedConfig) -> list[int]:
    """Choose up to MAX_LAYERS layers of a default configuration: one of each kind, then the last
    ones.

    Layers without experts come first, so the last layers have experts.
    """
    n_layers = getattr(config, "num_hidden_layers", None) or 0
    lists = [value for value in vars(config).values() if _is_per_layer(config, value)]
    kinds = [repr([values[layer] for values in lists]) for layer in range(n_layers)]
    first_of_kind = [layer for layer in range(n_layers) if kinds.index(kinds[layer]) == layer]
    rest = [layer for layer in reversed(range(n_layers)) if layer not in first_of_kind]
    return sorted((first_of_kind + rest)[:MAX_LAYERS])


def _draw_weights(model: PreTrainedModel) -> None:
    """Draw weights such that experts influence the output and rounding errors do not grow.

    The embedding is larger than what each layer adds to it, as in trained models.
    """
    head = model.get_output_embeddings()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn_like(tensor)
            if tensor.dim() < 2 or "bias" in name:  # norms and the like need what they start with
                tensor.add_(0.1 * noise)
            elif "embed" in name and (head is None or tensor is not head.weight):
                tensor.copy_(noise)
            else:
                is_router = ".gate." in name or "router" in name
                gain = ROUTER_GAIN if is_router else LAYER_GAIN
                tensor.copy_(gain / math.sqrt(tensor.shape[-1]) * noise)
        for name, buffer in _stored_buffers(model):
            if "tid2eid" in name:  # DeepSeek-V4's table from token to experts
                scores = torch.rand(len(buffer), model.config.n_routed_experts)
                buffer.copy_(scores.argsort(-1)[:, : buffer.shape[-1]])
            elif "bias" in name:  # of routers; loading ZAYA resets what does not start at zero
                buffer.add_(0.03 * torch.randn_like(buffer) * (buffer == 0))


def _stored_buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    stored = model.state_dict().keys()
    return (named for named in model.named_buffers() if named[0] in stored)

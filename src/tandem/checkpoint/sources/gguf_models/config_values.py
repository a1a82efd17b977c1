"""Config values that the metadata of all GGUF architectures have in common."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.checkpoint.sources.gguf_header import GgufHeader
from tandem.core.errors import ModelError, UnsupportedModelError
from tandem.foreign_types import PreTrainedConfig

_OPTIONAL = (
    "clip_qkv", "q_lora_rank", "intermediate_size", "final_logit_softcapping", "moe_latent_size",
)  # fmt: skip


def config_of(
    header: GgufHeader, model_type: str, without: Sequence[str] = (), /, **own: object
) -> PreTrainedConfig:
    """Return a config with the values that all architectures share, and the given `own` values.

    `without` names shared values that this architecture does not have. Raises `ModelError` if the
    file lacks a required value.
    """
    from transformers import AutoConfig

    values = {
        "hidden_size": header.value("embedding_length"),
        "num_hidden_layers": num_layers(header),
        "num_attention_heads": header.value("attention.head_count"),
        "num_key_value_heads": header.value("attention.head_count_kv"),
        "rms_norm_eps": header.value("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": header.value("context_length"),
        "num_experts_per_tok": header.value("expert_used_count"),
        "vocab_size": header.rows("token_embd.weight"),
        "rope_parameters": rope(header),
        **own,
    }
    values = {name: value for name, value in values.items() if name not in without}
    lacking = [name for name, value in values.items() if value is None and name not in _OPTIONAL]
    if lacking:
        raise ModelError(
            f"{header.file} does not say its {lacking[0]} (architecture {header.architecture!r}); "
            "the file is damaged or was made by an old converter: download it again"
        )
    return AutoConfig.for_model(
        model_type,
        **{name: value for name, value in values.items() if value is not None},
        tie_word_embeddings="output.weight" not in header.tensors,
        bos_token_id=header.at("tokenizer.ggml.bos_token_id"),
        eos_token_id=header.at("tokenizer.ggml.eos_token_id"),
        pad_token_id=header.at("tokenizer.ggml.padding_token_id"),
    )


def num_layers(header: GgufHeader) -> int:
    """Return the number of the model's own layers, without MTP layers."""
    return int(header.value("block_count", 0)) - int(header.value("nextn_predict_layers", 0))


def num_dense_layers(header: GgufHeader) -> int:
    """Return the number of dense layers before the first layer with experts; 0 without experts."""
    is_first = (f"blk.{n}.ffn_gate_inp.weight" in header.tensors for n in range(num_layers(header)))
    return next((number for number, has_router in enumerate(is_first) if has_router), 0)


def mlp_types(header: GgufHeader) -> list[str]:
    """Return each layer's type, "sparse" or "dense", for configs that list the types."""
    dense = num_dense_layers(header)
    return ["dense"] * dense + ["sparse"] * (num_layers(header) - dense)


def each_layer(header: GgufHeader, key: str) -> list[int]:
    """Return a per-layer list of counts for a key that holds one number or one per layer."""
    return [int(value) for value in values_of_layers(header, key)]


def values_of_layers(header: GgufHeader, key: str) -> list[Any]:
    """Return a per-layer list of values for a key that holds one value or one per layer."""
    value = header.value(key)
    layers = num_layers(header)
    if isinstance(value, list):
        if len(value) < layers:
            raise ModelError(
                f"{header.file} has {key} for {len(value)} layers, expected {layers}; "
                "download it again"
            )
        return value[:layers]
    if value is None:
        raise ModelError(f"{header.file} does not say its {key}; download it again")
    return [value] * layers


def widths(header: GgufHeader, experts: str = "num_experts") -> dict[str, object]:
    """Return config fields: number of experts, intermediate sizes of experts and of dense layers.

    `experts` is the name of the first field.
    """
    return {
        experts: header.value("expert_count"),
        "moe_intermediate_size": header.expert_width,
        "intermediate_size": header.value("feed_forward_length"),
    }


def windowed_layers(windows: Sequence[object]) -> list[str]:
    """Return "sliding_attention" for each layer with a window, "full_attention" without one."""
    return ["sliding_attention" if window else "full_attention" for window in windows]


def layer_types(header: GgufHeader, **marks: str) -> list[str]:
    """Return each layer's type: that of the first tensor in `marks` that the layer has.

    `marks` maps names of tensors to types. A layer without any of these tensors has the type
    "full_attention".
    """
    layers = [f"blk.{layer}." for layer in range(num_layers(header))]
    return [
        next((t for name, t in marks.items() if layer + name in header.tensors), "full_attention")
        for layer in layers
    ]


def head_dim(header: GgufHeader) -> int:
    """Return the width of a head."""
    length = header.value("attention.key_length") or header.value("rope.dimension_count")
    if length is None:
        length = header.value("embedding_length") // header.value("attention.head_count")
    return int(length)


def rope(header: GgufHeader) -> dict[str, object]:
    """Return the config's `rope_parameters`; `ModelError` for scaling other than YaRN or linear."""
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
            "truncate": header.architecture != "gpt-oss",  # gpt-oss's released config says False
        }
    multiplier = header.value("rope.scaling.yarn_log_multiplier")
    if kind == "yarn" and multiplier is not None:  # DeepSeek's models scale attention by it
        parameters |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * float(multiplier))
    return parameters


def llama3_rope(
    header: GgufHeader,
    parameters: dict[str, object],
    *,
    width: int,
    low: float,
    high: float,
    context: int,
) -> dict[str, object]:
    """Return the rotary `parameters`, with Llama 3's scaling if the file has its factors.

    The file has a factor for each frequency, but not the parameters that gave the factors.
    Frequencies above `high` turns per `context` positions keep their value, and those below `low`
    turns are divided by the largest factor. `width` dimensions of a head are rotated. Raises
    `UnsupportedModelError` if the file's factors differ from those that these numbers give.
    """
    stored = header.tensors.get("rope_freqs.weight")
    if stored is None:
        return parameters
    factors = stored.data.astype(np.float64).ravel()[: width // 2]
    turns = context / float(header.value("rope.freq_base", 1e4)) ** (np.arange(0, width, 2) / width)
    kept = np.clip((turns / (2 * np.pi) - low) / max(high - low, 1e-9), 0, 1)
    factor = float(factors.max(initial=1.0))
    expected = 1 / ((1 - kept) / factor + kept)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise UnsupportedModelError(
            f"{header.file} scales its positions by factors that are not its model's, which Tandem "
            "does not read from GGUF; use the model's safetensors instead"
        )
    return parameters | {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def partial_rope(header: GgufHeader) -> dict[str, object]:
    """Return `rope_parameters` of a model that rotates only some dimensions of each head."""
    width = head_dim(header)
    rotary = header.value("rope.dimension_count", width)
    return rope(header) | {"partial_rotary_factor": rotary / width}


def routing(header: GgufHeader) -> dict[str, object]:
    """Return the config fields for routing and experts' sizes, under DeepSeek's names."""
    return {
        **widths(header, "n_routed_experts"),
        "n_shared_experts": header.value("expert_shared_count", 1),
        "first_k_dense_replace": num_dense_layers(header),
        "routed_scaling_factor": header.value("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(header.value("expert_weights_norm", True)),
        "n_group": header.value("expert_group_count", 1),
        "topk_group": header.value("expert_group_used_count", 1),
    }

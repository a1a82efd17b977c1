"""Architectures that attend to compressed keys beside a window: DeepSeek-V4."""

from collections.abc import Sequence

from torch import Tensor

from tandem.checkpoint.sources.gguf_header import GgufHeader
from tandem.checkpoint.sources.gguf_models.architecture import Architecture, Names, Recipe
from tandem.checkpoint.sources.gguf_models.config_values import (
    config_of,
    each_layer,
    head_dim,
    partial_rope,
    routing,
)
from tandem.core.errors import UnsupportedModelError
from tandem.foreign_types import PreTrainedConfig

# llama.cpp's numbers for the functions that turn a router's logits into scores.
_SCORING = {1: "softmax", 2: "sigmoid", 4: "sqrtsoftplus"}
_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


def deepseek4(header: GgufHeader) -> PreTrainedConfig:
    """Make the config of a DeepSeek-V4."""
    kinds, rates = _compression(header)
    num_hashed = min(header.value("hash_layer_count", 0), len(kinds))
    rope = partial_rope(header)
    return config_of(
        header,
        "deepseek_v4",
        layer_types=kinds,
        compress_rates=rates,
        mlp_layer_types=["hash_moe"] * num_hashed + ["moe"] * (len(kinds) - num_hashed),
        head_dim=head_dim(header),
        q_lora_rank=header.value("attention.q_lora_rank"),
        o_lora_rank=header.value("attention.output_lora_rank"),
        o_groups=header.value("attention.output_group_count"),
        sliding_window=header.value("attention.sliding_window"),
        index_n_heads=header.value("attention.indexer.head_count"),
        index_head_dim=header.value("attention.indexer.key_length"),
        index_topk=header.value("attention.indexer.top_k"),
        hc_mult=header.value("hyper_connection.count"),
        hc_sinkhorn_iters=header.value("hyper_connection.sinkhorn_iterations"),
        hc_eps=header.value("hyper_connection.epsilon"),
        scoring_func=_SCORING.get(header.value("expert_gating_func", 4), "unknown"),
        swiglu_limit=_limit(header),
        rope_parameters=rope,
        rope_theta=rope["rope_theta"],
        partial_rotary_factor=rope["partial_rotary_factor"],
        compress_rope_theta=header.value("attention.compress_rope_freq_base"),
        **{name: value for name, value in routing(header).items() if name in _ROUTING},
    )


_ROUTING = (
    "n_routed_experts", "n_shared_experts", "moe_intermediate_size", "routed_scaling_factor",
    "norm_topk_prob",
)  # fmt: skip


def _compression(header: GgufHeader) -> tuple[list[str], dict[str, int]]:
    """Return each layer's type of attention, and by type the number of tokens per compressed key.

    Raises `UnsupportedModelError` if layers of one type have different numbers.
    """
    kinds: list[str] = []
    rates: dict[str, int] = {}
    for layer, ratio in enumerate(each_layer(header, "attention.compress_ratios")):
        has_indexer = f"blk.{layer}.indexer.proj.weight" in header.tensors
        kind = _SPARSE if has_indexer else _HEAVY
        kinds.append(kind if ratio else "sliding_attention")
        if ratio and rates.setdefault(kind, ratio) != ratio:
            raise UnsupportedModelError(
                f"{header.file} compresses {rates[kind]} tokens into a key in some layers and "
                f"{ratio} in others of the same kind; Transformers has one number for them"
            )
    return kinds, {_SPARSE: 4, _HEAVY: 128} | rates  # the default is the released model's


def _limit(header: GgufHeader) -> float | None:
    """Return the limit at which gate and up are clamped; None if there is none.

    Raises `UnsupportedModelError` for several limits, as Transformers has one for all layers.
    """
    limits: set[float] = set()
    for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        value = header.value(key, [])
        limits.update(value if isinstance(value, list) else [value])
    if len(limits) > 1:
        raise UnsupportedModelError(
            f"{header.file} cuts off its experts' activations at {sorted(limits)}, expected one "
            "limit for all layers; use the model's safetensors instead"
        )
    return next(iter(limits), None)


def _ids(parts: Sequence[Tensor], config: PreTrainedConfig) -> Tensor:
    """Return a table of expert numbers as int64, which Transformers uses."""
    return parts[0].long()


DEEPSEEK4: Names = {
    "hc_head.hc_fn": "output_hc_fn.weight",
    "hc_head.hc_base": "output_hc_base.weight",
    "hc_head.hc_scale": "output_hc_scale.weight",
    **{
        f"{place}_hc.{part}": f"hc_{place}_{part}.weight"
        for place in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    },
    "self_attn.q_a_norm": "attn_q_a_norm",
    "self_attn.kv_proj": "attn_kv",
    "self_attn.kv_norm": "attn_kv_a_norm",
    "o_a_proj": "attn_output_a",
    "o_b_proj": "attn_output_b",
    **{
        f"{module}.{part}": f"{tensors}_{name}"
        for module, tensors in (
            ("compressor", "attn_compressor"),
            ("indexer", "indexer_compressor"),
        )
        for part, name in (
            ("kv_proj", "kv"),
            ("gate_proj", "gate"),
            ("position_bias", "ape.weight"),
            ("kv_norm", "norm"),
        )
    },
    "indexer.q_b_proj": "indexer.attn_q_b",
    "scorer.weights_proj": "indexer.proj",
    "gate.tid2eid": Recipe(("ffn_gate_tid2eid.weight",), values=_ids),
}

ARCHITECTURES = {"deepseek4": Architecture(deepseek4, DEEPSEEK4)}

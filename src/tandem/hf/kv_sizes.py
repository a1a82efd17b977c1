"""What keys and values take, from a config alone."""

import torch

from tandem.checkpoint.config_values import value_of
from tandem.foreign_types import PreTrainedConfig

USUAL_CONTEXT = 4096  # tokens of a conversation
# Layers of these kinds, as Transformers calls them, keep a state of one size, or nothing.
_WITHOUT_KEYS = ("linear_attention", "conv", "moe", "mlp")
# What a layer with a window keeps beside it at most: tokens to go back, and a step's.
_BESIDE_WINDOW = 4096


def most_kv_bytes(
    config: PreTrainedConfig, dtype: torch.dtype, *, num_tokens: int, num_sequences: int
) -> int:
    """Return what keys and values of sequences of so many tokens each take on the CPU at most."""
    window = int(value_of(config, "sliding_window") or 0)
    kept = min(num_tokens, window + _BESIDE_WINDOW)
    layers = kv_bytes_by_layer(config, dtype, latents=2)
    return num_sequences * sum(
        num_bytes * (kept if kind == "sliding_attention" else num_tokens)
        for kind, num_bytes in layers
    )


def kv_bytes_by_layer(
    config: PreTrainedConfig, dtype: torch.dtype, *, latents: int
) -> list[tuple[str, int]]:
    """Return each layer's kind and what a token takes in it, with so many copies of a latent."""
    usual = "sliding_attention" if value_of(config, "sliding_window") else "full_attention"
    count = int(config.num_hidden_layers)
    kinds = value_of(config, "layer_types") or [usual] * count
    layers = value_of(config, "per_layer_config") or [config] * count
    return [
        (kind, 0 if kind in _WITHOUT_KEYS else _kv_bytes(layer, dtype, latents))
        for kind, layer in zip(kinds, layers, strict=True)
    ]


def _kv_bytes(config: PreTrainedConfig, dtype: torch.dtype, latents: int) -> int:
    """Return what a token's keys and values take in a layer, with so many copies of a latent."""
    if value_of(config, "kv_lora_rank"):
        return int(latents * config.kv_lora_rank + config.qk_rope_head_dim) * dtype.itemsize
    heads = int(value_of(config, "num_attention_heads") or 1)
    kv_heads = int(value_of(config, "num_key_value_heads") or heads)
    head_dim = int(value_of(config, "head_dim") or config.hidden_size // heads)
    return 2 * kv_heads * head_dim * dtype.itemsize

"""Computes the size of keys and values from a config alone."""

from typing import NamedTuple

import torch

from tandem.checkpoint.config_values import value_of
from tandem.foreign_types import PreTrainedConfig

USUAL_CONTEXT = 4096  # tokens of a conversation
# Transformers' names of layer types that keep a state of fixed size, or nothing.
_WITHOUT_KEYS = ("linear_attention", "conv", "moe", "mlp")
_INDEXED = "compressed_sparse_attention"  # an indexer selects among its compressed keys
_SELECTING = "minimax_m3_sparse"  # an indexer selects among all keys
_SLIDING = "sliding_attention"
# GPU kernels read index keys in fp32, and only the GPU keeps a single copy of the keys.
_GPU_INDEX_BYTES = 4
# Positions kept before a window, so that a slot can go back: the next turn of a conversation often
# writes the end of the last one differently, and requests may begin with the same instructions.
# Drafted tokens, and a padding token on a GPU, overwrite a part of it. With it a window of 128
# takes 1,024 positions.
MARGIN_TOKENS = 896
# A slot grows in steps of this size, so that it is copied rarely and is never much too large.
GRANULE_TOKENS = 256


class KvSizes(NamedTuple):
    """Sizes of keys and values by layer; computes a sequence's bytes on the CPU or a GPU."""

    layers: tuple[tuple[str, int], ...]
    """(kind, bytes of a token) for each layer; a layer with compressed keys has two entries."""
    window: int
    """Positions that layers with a window see; 0: no windows."""
    has_compressed: bool = False
    """Whether some layers have compressed keys besides a window."""
    expanded: tuple[int, ...] = ()
    """For each layer with latents that a prompt's attention expands on the CPU: bytes per token of
    the expanded keys and values."""

    @property
    def token_bytes(self) -> int:
        """Bytes per token over all layers, as if no layer had a window."""
        return sum(num_bytes for _, num_bytes in self.layers)

    def bytes_of(self, num_tokens: int) -> int:
        """Return the most bytes that `num_tokens` of one sequence take on the CPU.

        There, layers with a window keep only the last tokens.
        """
        return self._bytes_of(num_tokens, min(num_tokens, ring_size(self.window)))

    def device_bytes_of(self, num_tokens: int) -> int:
        """Return the most bytes that `num_tokens` of one sequence take on a GPU.

        A GPU keeps windows in a ring for models with compressed keys; for others it keeps all
        positions.
        """
        return self._bytes_of(
            num_tokens, ring_size(self.window) if self.has_compressed else num_tokens
        )

    def _bytes_of(self, num_tokens: int, of_window: int) -> int:
        return sum(n * (of_window if kind == _SLIDING else num_tokens) for kind, n in self.layers)


def kv_sizes_of(config: PreTrainedConfig, dtype: torch.dtype, *, latents: int = 2) -> KvSizes:
    """Return the sizes of keys and values in a dtype; latents are stored in `latents` copies.

    The CPU stores two copies, a GPU one.
    """
    window = int(value_of(config, "sliding_window") or 0)
    count = int(config.num_hidden_layers)
    kinds = value_of(config, "layer_types") or [_SLIDING if window else "full_attention"] * count
    layers = value_of(config, "per_layer_config") or [config] * count
    each = (
        part
        for kind, layer in zip(kinds, layers, strict=True)
        for part in _parts_of(kind, layer, dtype, latents)
    )
    compressed = bool(value_of(config, "compress_rates"))
    expanded = tuple(
        _expanded_bytes(layer, dtype)
        for kind, layer in zip(kinds, layers, strict=True)
        if latents > 1 and kind not in _WITHOUT_KEYS and value_of(layer, "kv_lora_rank")
    )
    return KvSizes(tuple(each), window, compressed, expanded)


def ring_size(window: int) -> int:
    """Return the number of positions in a slot's ring for a layer with this window."""
    return whole_granules(window + MARGIN_TOKENS)


def whole_granules(num_tokens: int) -> int:
    """Return `num_tokens`, rounded up to a multiple of the step by which slots grow."""
    return -(-num_tokens // GRANULE_TOKENS) * GRANULE_TOKENS


def _parts_of(
    kind: str, config: PreTrainedConfig, dtype: torch.dtype, copies: int
) -> list[tuple[str, int]]:
    """Return (kind, bytes per token) for the keys and values of a layer.

    A layer with compressed keys has two entries: one for these, and one for its window's keys, of
    the kind `_SLIDING`. A latent is stored in `copies` copies.
    """
    if kind in _WITHOUT_KEYS:
        return [(kind, 0)]
    index_bytes = dtype.itemsize if copies > 1 else _GPU_INDEX_BYTES
    has_index = kind in (_INDEXED, _SELECTING)
    index = int(config.index_head_dim) * index_bytes if has_index else 0
    ratios = value_of(config, "compress_rates")
    if not ratios:
        return [(kind, _kv_bytes(config, dtype, copies) + index)]
    key = int(config.head_dim) * dtype.itemsize  # the key is also the value
    if kind not in ratios:
        return [(kind, key)]
    return [(kind, -(-(key + index) // int(ratios[kind]))), (_SLIDING, key)]


def _expanded_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of all heads' keys and values that a token's latent expands to."""
    dims = (value_of(config, n) for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return int(config.num_attention_heads) * sum(int(dim or 0) for dim in dims) * dtype.itemsize


def _kv_bytes(config: PreTrainedConfig, dtype: torch.dtype, latents: int) -> int:
    """Return the bytes of a token's keys and values in one layer.

    A latent is stored in `latents` copies.
    """
    if value_of(config, "kv_lora_rank"):
        return int(latents * config.kv_lora_rank + config.qk_rope_head_dim) * dtype.itemsize
    heads = int(value_of(config, "num_attention_heads") or 1)
    kv_heads = int(value_of(config, "num_key_value_heads") or heads)
    head_dim = int(value_of(config, "head_dim") or config.hidden_size // heads)
    return 2 * kv_heads * head_dim * dtype.itemsize

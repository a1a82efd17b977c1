"""Tokens that nobody said: random keys and values in a slot, to time a step at a depth."""

import torch

from tandem.kernels.attention import CachedAttention
from tandem.kernels.dense import CpuThreads

_AT_ONCE = 1024  # tokens


def pretend(layer: CachedAttention, threads: CpuThreads, slot: int, length: int) -> None:
    """Let a slot of a layer hold `length` invented tokens; there is room for them."""
    form = layer.form
    count = min(length, _AT_ONCE)
    key, value = (
        torch.randn(form.num_kv_heads, count, dim, device="cpu") * 0.1
        for dim in (form.key_dim, form.value_dim)
    )
    for first in range(0, length, _AT_ONCE):
        positions = torch.arange(first, min(first + count, length), device="cpu")
        part = slice(0, len(positions))
        slots = torch.full_like(positions, slot)
        layer.append(threads, slots, positions, key[:, part], value[:, part])

"""Cases that compare the Triton kernels' decode attention with torch, interpreted or on a GPU."""

from typing import Any

import torch
from torch import Tensor

from tandem.kernels.attention import AttentionForm, DistanceBias, Segment
from tandem.kv_cache.attention_call import AttentionCall
from tandem.kv_cache.cuda.cache import StaticKvCache
from tandem.kv_cache.cuda.layers import DecodeKernels

# Of a form: windows, chunks, softcaps.
VARIANTS: list[dict[str, Any]] = [
    {"window": 5}, {"window": 64}, {"chunk": 70}, {"softcap": 3.0}, {"window": 40, "softcap": 20.0},
]  # fmt: skip


def form_of(
    heads: int, kv_heads: int, key_dim: int, value_dim: int = 0, **more: Any
) -> AttentionForm:
    """Return an attention form with the usual scale; values are as wide as keys by default."""
    return AttentionForm(
        num_heads=heads, num_kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim or key_dim,
        scale=key_dim**-0.5, **more,
    )  # fmt: skip


def tokens(
    form: AttentionForm, count: int, dtype: torch.dtype, random: torch.Generator, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of some tokens, (heads, tokens, dim), as strided views."""

    def some(heads: int, dim: int) -> Tensor:
        return torch.randn(count, heads, dim, generator=random).to(device, dtype).transpose(0, 1)

    kv_heads = form.num_kv_heads
    return (
        some(form.num_heads, form.key_dim), some(kv_heads, form.key_dim),
        some(kv_heads, form.value_dim),
    )  # fmt: skip


def attend_both(
    kernels: DecodeKernels,
    form: AttentionForm,
    lengths: list[int],
    *,
    kv_dtype: str = "auto",
    dtype: torch.dtype = torch.float32,
    has_sinks: bool = False,
    device: str = "cpu",
    steps: int = 2,
    extent: int = 0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Fill slots to some lengths and decode one step, by torch and by the kernels.

    With an `extent`, scores have a distance bias and each token has its own sinks.
    """
    sinks = torch.linspace(-1, 2, form.num_heads).to(device, dtype) if has_sinks else None
    found = []

    def call(count: int, random: torch.Generator) -> AttentionCall:
        parts = tokens(form, count, dtype, random, device)
        if not extent:
            return AttentionCall(form, *parts, sinks)
        states = torch.randn(count, form.num_heads, 5, generator=random).to(device, dtype)
        profiles = torch.randn(5, extent, generator=random).to(device, dtype)
        bias = DistanceBias(states.transpose(0, 1), profiles)
        return AttentionCall(form, *parts, states[..., 0], bias=bias)

    for used in (None, kernels):
        random = torch.Generator().manual_seed(1)

        cache = StaticKvCache(
            len(lengths), 1, torch.device(device), kv_dtype=kv_dtype, kernels=used
        )
        for slot, length in enumerate(lengths):
            if length:
                cache.begin(Segment(slot, 0, length))
                cache.expect(0)
                cache.attend(call(length, random))
                cache.commit()
        results = []
        for _ in range(steps):
            cache.begin_decode(dict.fromkeys(range(len(lengths)), 1), len(lengths))
            cache.expect(0)
            results.append(cache.attend(call(len(lengths), random)))
            cache.commit()
        found.append(results)
    return found[0], found[1]

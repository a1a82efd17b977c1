"""Keys and values of a slot's tokens as plain bytes: taken out of the KV cache, and put back."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tandem.kernels.attention import BLOCK_TOKENS, CachedAttention


def take_out(
    layers: Sequence[CachedAttention], slot: int, first: int, num_tokens: int
) -> memoryview:
    """Return a copy of what layers keep of tokens that fill whole blocks."""
    parts = list(_blocks(layers, slot, first, num_tokens))
    copied = torch.cat([part.flatten() for part in parts])
    return copied.numpy().data


def put_in(layers: Sequence[CachedAttention], slot: int, first: int, data: memoryview) -> None:
    """Write what `take_out` has returned to a place that the layers have room for."""
    per_block = sum(layer.bytes_of(BLOCK_TOKENS) for layer in layers)
    num_tokens = len(data) // per_block * BLOCK_TOKENS
    source = torch.frombuffer(data, dtype=torch.uint8)
    begin = 0
    for part in _blocks(layers, slot, first, num_tokens):
        part.copy_(source[begin : begin + part.numel()].view(part.shape))
        begin += part.numel()
    assert begin == len(data)


def _blocks(
    layers: Sequence[CachedAttention], slot: int, first: int, num_tokens: int
) -> Iterator[Tensor]:
    """Yield the memory of some tokens: (KV heads, blocks, bytes of a block) uint8."""
    assert first % BLOCK_TOKENS == num_tokens % BLOCK_TOKENS == 0
    begin, end = first // BLOCK_TOKENS, (first + num_tokens) // BLOCK_TOKENS
    for layer in layers:
        for tensor in (layer.keys, layer.values):
            yield tensor[slot, :, begin:end]

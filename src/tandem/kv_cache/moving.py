"""Keys and values of a slot's tokens as plain bytes: taken out of the KV cache, and put back."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tandem.kernels.attention import BLOCK_TOKENS, CachedAttention
from tandem.kv_cache.index_keys import IndexStore

# A cache's layers, each with the first position that a slot keeps.
Layers = Sequence[tuple[CachedAttention, int]]


def take_out(
    layers: Layers, index_keys: IndexStore, slot: int, first: int, num_tokens: int
) -> memoryview | None:
    """Return a copy of what layers keep of tokens that fill whole blocks; None if one forgot."""
    if any(kept > first for _, kept in layers):
        return None
    parts = list(_memory(layers, index_keys, slot, first, num_tokens))
    copied = torch.cat([part.flatten() for part in parts])
    return copied.numpy().data


def put_in(
    layers: Layers,
    index_keys: IndexStore,
    slot: int,
    first: int,
    num_tokens: int,
    data: memoryview,
) -> None:
    """Write what `take_out` has returned of so many tokens; the layers have room for them."""
    parts = list(_memory(layers, index_keys, slot, first, num_tokens))
    pieces = pieces_of(data, [part.numel() for part in parts])
    for part, piece in zip(parts, pieces, strict=True):
        part.copy_(piece.view(part.shape))


def pieces_of(data: memoryview, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Cut bytes that came from a file or another slot; raises `ValueError` if not all fit."""
    if len(data) != sum(sizes):
        raise ValueError(f"{len(data)} bytes of keys, values or states, expected {sum(sizes)}")
    pieces: Sequence[Tensor] = torch.frombuffer(data, dtype=torch.uint8).split(list(sizes))
    return pieces


def _memory(
    layers: Layers, index_keys: IndexStore, slot: int, first: int, num_tokens: int
) -> Iterator[Tensor]:
    """Yield the memory of some tokens: of keys and values (KV heads, blocks, bytes) uint8."""
    assert first % BLOCK_TOKENS == num_tokens % BLOCK_TOKENS == 0
    num_blocks = num_tokens // BLOCK_TOKENS
    for layer, kept in layers:
        begin = (first - kept) // BLOCK_TOKENS
        for tensor in (layer.keys, layer.values):
            yield tensor[slot, :, begin : begin + num_blocks]
    yield from index_keys.memory(slot, first, num_tokens)

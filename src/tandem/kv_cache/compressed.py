"""Compressed keys: what layers keep of every so many tokens, beside a window of their own.

A key is its value, too, and all heads have it. It comes with the last token that it stands for, so
a slot that goes back to fewer tokens has those of all windows before, and writes others again.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.attention import BLOCK_TOKENS, CachedAttention

_PACKS = {"fp32": 1, "bf16": 2, "int8": 4}  # values of a dword, see csrc/kv_layout.hpp
_DWORD_BYTES = 4


class _Kept(NamedTuple):
    layer: CachedAttention
    ratio: int

    def num_keys(self, num_tokens: int) -> int:
        """How many keys so many tokens of a slot have, an unfinished window's included."""
        return -(-num_tokens // self.ratio)


class CompressedStore:
    """The compressed keys of a model's layers on the CPU."""

    def __init__(self, num_slots: int) -> None:
        """Hold nothing for so many slots; layers come as the model asks for them."""
        self._num_slots = num_slots
        self._layers: dict[int, _Kept] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that all keys take."""
        return sum(kept.layer.num_bytes for kept in self._layers.values())

    def bytes_of(self, num_tokens: int) -> int:
        """Return the bytes of so many tokens of one slot, in all layers."""
        kept = self._layers.values()
        return sum(one.layer.bytes_of(one.num_keys(num_tokens)) for one in kept)

    @property
    def ratios(self) -> set[int]:
        """How many tokens a key stands for, in any layer."""
        return {kept.ratio for kept in self._layers.values()}

    @property
    def layers(self) -> list[tuple[CachedAttention, int]]:
        """What holds each layer's keys, and how many tokens one stands for."""
        return list(self._layers.values())

    def add(self, number: int, layer: CachedAttention, ratio: int, capacity: int) -> None:
        """Take a layer, which is empty, with room for so many tokens in each slot."""
        kept = self._layers[number] = _Kept(layer, ratio)
        self._reserve(kept, capacity, 0)

    def reserve(self, capacity: int, used: int) -> None:
        """Make room for `capacity` tokens in each slot, of which the first `used` are kept."""
        for kept in self._layers.values():
            self._reserve(kept, capacity, used)

    def _reserve(self, kept: _Kept, capacity: int, used: int) -> None:
        kept.layer.reserve(self._num_slots, kept.num_keys(capacity), used // kept.ratio)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Let a slot begin with the first `length` tokens of another one."""
        for layer, ratio in self._layers.values():
            layer.copy_prefix(source, target, length // ratio)

    @torch.inference_mode()
    def begin_blocks(self, slot: int, first: int) -> None:
        """Clear the blocks that keys from token `first` on begin: all of a block is read."""
        for layer, ratio in self._layers.values():
            block, at = divmod(first // ratio, BLOCK_TOKENS)
            for memory in (layer.keys, layer.values):
                if at == 0:
                    memory[slot, :, block : block + 1].zero_()

    def memory(self, slot: int, first: int, num_tokens: int) -> Iterator[Tensor]:
        """Yield the memory of some tokens' keys, which are whole windows: uint8 of any shape."""
        for number in sorted(self._layers):
            layer, ratio = self._layers[number]
            begin, end = first // ratio, (first + num_tokens) // ratio
            if begin % BLOCK_TOKENS == end % BLOCK_TOKENS == 0:
                blocks = slice(begin // BLOCK_TOKENS, end // BLOCK_TOKENS)
                yield from (memory[slot, :, blocks] for memory in (layer.keys, layer.values))
            else:
                for key in range(begin, end):
                    yield from _memory_of_key(layer, slot, key)


def _memory_of_key(layer: CachedAttention, slot: int, key: int) -> Iterator[Tensor]:
    """Yield what a block has of one key, as `csrc/kv_layout.hpp` says."""
    block, at = divmod(key, BLOCK_TOKENS)
    pack = _PACKS[layer.kv_dtype]
    scale_bytes = BLOCK_TOKENS * _DWORD_BYTES if layer.kv_dtype == "int8" else 0
    keys, values = (memory[slot, 0, block] for memory in (layer.keys, layer.values))
    num_bytes = len(keys) - scale_bytes, len(values) - scale_bytes
    yield keys[: num_bytes[0]].view(-1, BLOCK_TOKENS, _DWORD_BYTES)[:, at]
    of_values = values[: num_bytes[1]].view(BLOCK_TOKENS // pack, -1, pack, _DWORD_BYTES // pack)
    yield of_values[at // pack, :, at % pack]
    if scale_bytes:
        yield from (
            x[n:].view(BLOCK_TOKENS, _DWORD_BYTES)[at]
            for x, n in zip((keys, values), num_bytes, strict=True)
        )

"""Compressed keys: a layer keeps one key per window of tokens, beside its sliding window.

A key is its own value, and all heads share it. Each key is added with the last token of its window.
A truncated slot therefore keeps the keys of all complete windows, and writes later keys again.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tandem.kernels.attention import CompressedKeys
from tandem.kv_cache.index_keys import IndexStore


class CompressedStore:
    """The compressed keys of a model's layers on the CPU."""

    def __init__(self, num_slots: int) -> None:
        """Start empty, for `num_slots` slots; layers are added when the model uses them."""
        self._num_slots = num_slots
        self._layers: dict[int, CompressedKeys] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that the keys of all layers and slots take, unused room included."""
        return sum(keys.num_bytes for keys in self._layers.values())

    def bytes_of(self, num_tokens: int) -> int:
        """Return the bytes that all layers' keys of `num_tokens` tokens take in one slot."""
        return sum(keys.bytes_of(num_tokens) for keys in self._layers.values())

    def read_bytes(self, length: int, index_keys: IndexStore) -> int:
        """Return the bytes of compressed keys that a token reads in a slot of `length` tokens."""
        layers = self._layers.items()
        return sum(keys.bytes_of(index_keys.read_tokens(n, length)) for n, keys in layers)

    @property
    def ratios(self) -> set[int]:
        """The set of the layers' ratios: tokens per key."""
        return {keys.ratio for keys in self._layers.values()}

    def add(self, number: int, keys: CompressedKeys, capacity: int) -> None:
        """Add the empty `keys` of layer `number`; make room for `capacity` tokens in each slot."""
        self._layers[number] = keys
        keys.reserve(self._num_slots, capacity)

    def reserve(self, capacity: int, used: int) -> None:
        """Make room for `capacity` tokens in each slot; keep the first `used` tokens' keys."""
        for keys in self._layers.values():
            keys.reserve(self._num_slots, capacity, used)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the keys of slot `source`'s first `length` tokens to slot `target`."""
        for keys in self._layers.values():
            keys.of_tokens(target, 0, length).copy_(keys.of_tokens(source, 0, length))

    @torch.inference_mode()
    def pretend(self, length: int) -> None:
        """Fill every slot with made-up keys for `length` tokens."""
        for keys in self._layers.values():
            keys.invent(length)

    def memory(self, slot: int, first: int, num_tokens: int) -> Iterator[Tensor]:
        """Yield for each layer a view of the keys of a slot's `num_tokens` tokens from `first` on.

        The views are (keys, bytes) uint8. The tokens must fill whole windows.
        """
        for _, keys in sorted(self._layers.items()):
            yield keys.of_tokens(slot, first, num_tokens)

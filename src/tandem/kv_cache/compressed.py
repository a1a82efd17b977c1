"""Compressed keys: what layers keep of every so many tokens, beside a window of their own.

A key is its value, too, and all heads have it. It comes with the last token that it stands for, so
a slot that goes back to fewer tokens has those of all windows before, and writes others again.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tandem.kernels.attention import CompressedKeys
from tandem.kv_cache.index_keys import IndexStore


class CompressedStore:
    """The compressed keys of a model's layers on the CPU."""

    def __init__(self, num_slots: int) -> None:
        """Hold nothing for so many slots; layers come as the model asks for them."""
        self._num_slots = num_slots
        self._layers: dict[int, CompressedKeys] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that all keys take."""
        return sum(keys.num_bytes for keys in self._layers.values())

    def bytes_of(self, num_tokens: int) -> int:
        """Return the bytes of so many tokens of one slot, in all layers."""
        return sum(keys.bytes_of(num_tokens) for keys in self._layers.values())

    def read_bytes(self, length: int, index_keys: IndexStore) -> int:
        """Return the bytes that a token reads in a slot of so many tokens."""
        layers = self._layers.items()
        return sum(keys.bytes_of(index_keys.read_tokens(n, length)) for n, keys in layers)

    @property
    def ratios(self) -> set[int]:
        """How many tokens a key stands for, in any layer."""
        return {keys.ratio for keys in self._layers.values()}

    def add(self, number: int, keys: CompressedKeys, capacity: int) -> None:
        """Take a layer's, which are none yet, with room for so many tokens in each slot."""
        self._layers[number] = keys
        keys.reserve(self._num_slots, capacity)

    def reserve(self, capacity: int, used: int) -> None:
        """Make room for `capacity` tokens in each slot, of which the first `used` are kept."""
        for keys in self._layers.values():
            keys.reserve(self._num_slots, capacity, used)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Let a slot begin with the first `length` tokens of another one."""
        for keys in self._layers.values():
            keys.of_tokens(target, 0, length).copy_(keys.of_tokens(source, 0, length))

    @torch.inference_mode()
    def pretend(self, length: int) -> None:
        """Let every slot hold invented keys for `length` tokens."""
        for keys in self._layers.values():
            keys.invent(length)

    def memory(self, slot: int, first: int, num_tokens: int) -> Iterator[Tensor]:
        """Yield the memory of some tokens' keys, which are whole windows: (keys, bytes) uint8."""
        for _, keys in sorted(self._layers.items()):
            yield keys.of_tokens(slot, first, num_tokens)

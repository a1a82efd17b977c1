"""Copies keys and values of a slot's tokens out of the CPU's KV cache as bytes, and back in."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tandem.kernels.attention import BLOCK_TOKENS, Segment
from tandem.kv_cache.cpu import KvCache
from tandem.kv_cache.cpu_states import pieces_of


class MovingSlots:
    """Moves keys and values out of slots and into slots; `states` must be moved separately."""

    def __init__(self, cache: KvCache, held: list[list[int]]) -> None:
        """Take a KV cache and `held`, each slot's tokens; `cut` and `put_in` will update both."""
        self._cache, self._held = cache, held
        self.states = cache.states

    @torch.inference_mode()
    def take_out(self, slot: int, first: int, num_tokens: int) -> memoryview | None:
        """Return a copy of all bytes that a slot keeps of `num_tokens` tokens from `first` on.

        The tokens must fill whole blocks. None if a window has dropped some of the tokens, or if
        their keys and values are not as a prompt would compute them (`SlotCache.seen_whole`).
        """
        is_whole = first + num_tokens <= self._cache.seen_whole(slot)
        if not is_whole or any(kept > first for _, kept in self._cache.layers_of(slot)):
            return None
        copied = torch.cat([part.flatten() for part in self._memory(slot, first, num_tokens)])
        return copied.numpy().data

    def cut(self, slot: int, length: int) -> bool:
        """Make a slot forget all tokens after its first `length`, and return True.

        `put_in` can then add other tokens. Returns False, and forgets nothing, if a layer's window
        has dropped tokens that the next token would see. States of the slot must be put in again.
        """
        is_cut = self._cache.cut(slot, length)
        if is_cut:
            del self._held[slot][length:]
        return is_cut

    @torch.inference_mode()
    def put_in(self, slot: int, tokens: Sequence[int], data: memoryview) -> None:
        """Append tokens to a slot, with the bytes that `take_out` returned for the same tokens.

        If slots have `states`, the slot must not be used before its states are put in too.
        """
        first, count = self._cache.lengths[slot], len(tokens)
        self._cache.begin([Segment(slot, first, count)])  # makes room
        parts = list(self._memory(slot, first, count))
        pieces = pieces_of(data, [part.numel() for part in parts])
        for part, piece in zip(parts, pieces, strict=True):
            part.copy_(piece.view(part.shape))
        self._cache.commit()
        self._held[slot] += tokens

    def _memory(self, slot: int, first: int, num_tokens: int) -> Iterator[Tensor]:
        """Yield the memory of `num_tokens` tokens from `first` on, as uint8 tensors.

        The tensors of keys and values are (KV heads, blocks, bytes).
        """
        assert first % BLOCK_TOKENS == num_tokens % BLOCK_TOKENS == 0
        num_blocks = num_tokens // BLOCK_TOKENS
        for layer, _ in self._cache.layers_of(slot):
            begin = first // BLOCK_TOKENS % layer.keys.shape[2]  # a ring if it has a window
            assert begin + num_blocks <= layer.keys.shape[2]
            for tensor in (layer.keys, layer.values):
                yield tensor[slot, :, begin : begin + num_blocks]
        yield from self._cache.index_keys.memory(slot, first, num_tokens)
        yield from self._cache.compressed.memory(slot, first, num_tokens)

"""Tokens of a slot as plain bytes: taken out of the CPU's KV cache, and put into a slot again."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tandem.kernels.attention import BLOCK_TOKENS, Segment
from tandem.kv_cache.cpu import KvCache
from tandem.kv_cache.cpu_states import pieces_of


class MovingSlots:
    """Slots whose contents move; where they have `states`, these move by themselves."""

    def __init__(self, cache: KvCache, held: list[list[int]]) -> None:
        """Move what a cache keeps; `held` are the tokens of each slot."""
        self._cache, self._held = cache, held
        self.states = cache.states

    @torch.inference_mode()
    def take_out(self, slot: int, first: int, num_tokens: int) -> memoryview | None:
        """Return a copy of all that a slot keeps of some tokens; None if a window has left them.

        Or has left something before them that a prompt's tokens see. They fill whole blocks.
        """
        is_whole = first + num_tokens <= self._cache.seen_whole(slot)
        if not is_whole or any(kept > first for _, kept in self._cache.layers_of(slot)):
            return None
        copied = torch.cat([part.flatten() for part in self._memory(slot, first, num_tokens)])
        return copied.numpy().data

    def cut(self, slot: int, length: int) -> bool:
        """Let a slot forget what it holds beyond `length` tokens, so that others are put in.

        False: it has forgotten a part of what is before them.
        """
        is_cut = self._cache.cut(slot, length)
        if is_cut:
            del self._held[slot][length:]
        return is_cut

    @torch.inference_mode()
    def put_in(self, slot: int, tokens: Sequence[int], data: memoryview) -> None:
        """Append tokens to a slot, with what `take_out` has returned of the same ones.

        Where slots have states, the slot is of no use before these are put in.
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
        """Yield the memory of some tokens: of keys and values (KV heads, blocks, bytes) uint8."""
        assert first % BLOCK_TOKENS == num_tokens % BLOCK_TOKENS == 0
        num_blocks = num_tokens // BLOCK_TOKENS
        for layer, _ in self._cache.layers_of(slot):
            begin = first // BLOCK_TOKENS % layer.keys.shape[2]  # in a ring, if it has a window
            assert begin + num_blocks <= layer.keys.shape[2]
            for tensor in (layer.keys, layer.values):
                yield tensor[slot, :, begin : begin + num_blocks]
        yield from self._cache.index_keys.memory(slot, first, num_tokens)
        yield from self._cache.compressed.memory(slot, first, num_tokens)

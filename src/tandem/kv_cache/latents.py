"""Latent attention in sequence slots: a token keeps its latent and its rotary key, for all heads.

Latent and rotary key together are a token's single key in a layer; the latent is its value. Decode
steps attend to latents directly. In a prompt, latents are expanded to keys and values of each head:
many tokens share this work, so it costs less than attending to latents. Either way a token reads
the stored, rounded values, so a prompt may be cut anywhere. Expanded keys stay for the slot's next
prompt while memory is free.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.experts.store import host_memory
from tandem.kernels.attention import BLOCK_TOKENS, AttentionForm, CachedAttention, Segment
from tandem.kernels.dense import CpuThreads
from tandem.kv_cache.attention_call import AttentionCall

# Latents expanded at a time, in whole blocks, before they are copied to the kernels' layout.
_AT_ONCE = 1024
# Share of the free memory for expanded keys and values.
_SHARE = 0.25
_KEPT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
_DWORD_BYTES = 4
_INT8_OFFSET = 128  # added to int8 keys


def most_expanded_bytes(available_bytes: int) -> int:
    """Return how many of `available_bytes` the expanded keys and values of all slots may take."""
    return int(_SHARE * max(0, available_bytes))


class Expansion(NamedTuple):
    """How a prompt's tokens attend to the keys and values that latents expand to."""

    form: AttentionForm
    """The form of attention to the expanded keys and values, for each head."""
    dtype: torch.dtype
    """The dtype of expanded keys and values."""
    expand: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Expands stored latents (n, latent + rotary) to keys (heads, n, key dim) and values (heads, n,
    dim)."""


class _Expanded(NamedTuple):
    """The expanded keys and values of one layer and slot."""

    layer: CachedAttention
    length: int
    """The number of positions that are expanded and have not changed in the slot since."""


class ExpandedKeys:
    """The keys and values expanded from slots' latents; they are kept while memory is free.

    Keys and values that were dropped are expanded again when needed, which only costs time.
    """

    def __init__(self) -> None:
        # slot (least recently used first) -> layer -> expanded keys.
        self._expanded: OrderedDict[int, dict[CachedAttention, _Expanded]] = OrderedDict()
        # Slot -> first position that changed since it was expanded.
        self._written: dict[int, int] = {}
        self._shared: CachedAttention | None = None  # shared by layers that have no room

    @property
    def num_bytes(self) -> int:
        """The size of all expanded keys and values in bytes."""
        shared = 0 if self._shared is None else self._shared.num_bytes
        expanded = (one for layers in self._expanded.values() for one in layers.values())
        return shared + sum(one.layer.num_bytes for one in expanded)

    def clear(self) -> None:
        """Free all memory."""
        self._expanded.clear()
        self._written.clear()
        self._shared = None

    def note_written(self, slot: int, position: int) -> None:
        """Record that a slot's latents change from a position on, and must be expanded again."""
        if slot in self._expanded:
            self._written[slot] = min(position, self._written.get(slot, position))

    def attend(
        self,
        threads: CpuThreads,
        kept: CachedAttention,
        segments: Sequence[Segment],
        positions: Tensor,
        call: AttentionCall,
        expansion: Expansion,
        out: Tensor,
    ) -> None:
        """Attend to expanded keys and values, slot by slot; write to `out`.

        `out` is (n_tokens, heads, value dim). The latents of the tokens, at `positions`
        (n_tokens,), must be in `kept` already.
        """
        form, query, selected = expansion.form, call.query, call.selected
        begin = 0
        for segment in segments:
            part = slice(begin, begin + segment.num_tokens)
            first = _first_seen(form, segment)
            begin, places = part.stop, positions[part] - first
            layer = self._filled(threads, kept, segment, first, expansion)
            layer = layer if call.sinks is None else layer.with_sinks(call.sinks)
            own = None if selected is None else selected[part]
            slots = torch.zeros_like(places)
            layer.attend(threads, slots, places, query[:, part], own, out=out[part])

    def _filled(
        self, threads: CpuThreads, kept: CachedAttention, new: Segment, first: int, by: Expansion
    ) -> CachedAttention:
        """Return the expanded keys and values from position `first` to `new`'s last one.

        They are in slot 0 of the result. Only latents that are not expanded yet, or have changed
        since, are expanded.
        """
        slot, length = new.slot, new.first_position + new.num_tokens - first
        self._forget_written(slot)
        layer, filled = self._room(kept, slot, length, by)
        for at in range(filled // BLOCK_TOKENS * BLOCK_TOKENS, length, _AT_ONCE):
            count = min(_AT_ONCE, length - at)
            keys, values = by.expand(kept_keys(kept, slot, first + at, count).to(by.dtype))
            places = torch.arange(at, at + count, device="cpu")
            layer.append(threads, torch.zeros_like(places), places, keys, values)
        if layer is not self._shared:
            self._expanded[slot][kept] = _Expanded(layer, length)
        return layer

    def _forget_written(self, slot: int) -> None:
        end = self._written.pop(slot, None)
        if end is not None:
            layers = self._expanded[slot]
            layers |= {
                kept: one._replace(length=min(one.length, end)) for kept, one in layers.items()
            }

    def _room(
        self, kept: CachedAttention, slot: int, length: int, by: Expansion
    ) -> tuple[CachedAttention, int]:
        """Return memory for `length` expanded positions, and how many of them are valid already."""
        layers = self._expanded.setdefault(slot, {})
        self._expanded.move_to_end(slot)
        layer, filled = layers.get(kept) or (CachedAttention(by.form, by.dtype), 0)
        capacity = layer.keys.shape[2] * BLOCK_TOKENS
        if by.form.window:
            filled = 0  # their positions begin elsewhere
        if length <= capacity:
            return layer, filled
        # The slots are made for so many tokens; they grow before this memory must.
        most = kept.keys.shape[2] * BLOCK_TOKENS
        capacity = max(length, min(capacity * 3 // 2, length + _AT_ONCE, most))
        if by.form.window or not self._has_room(layer.bytes_of(capacity), slot):
            layers.pop(kept, None)
            return self._shared_room(length, by), 0
        layer.reserve(1, capacity, filled)
        return layer, filled

    def _has_room(self, num_bytes: int, slot: int) -> bool:
        """Tell whether `num_bytes` more may be used; drop other slots' expanded keys if needed.

        Those of the least recently used slot are dropped first.
        """
        while True:
            limit = most_expanded_bytes(host_memory.available_bytes() + self.num_bytes)
            if self.num_bytes + num_bytes <= limit:
                return True
            oldest = next(iter(self._expanded))
            if oldest == slot:
                return False
            del self._expanded[oldest]
            self._written.pop(oldest, None)

    def _shared_room(self, length: int, by: Expansion) -> CachedAttention:
        shared = self._shared
        fits = shared is not None and length <= shared.keys.shape[2] * BLOCK_TOKENS
        if shared is None or not fits or shared.form != by.form:
            shared = self._shared = CachedAttention(by.form, by.dtype)
            shared.reserve(1, length)
        return shared


def _first_seen(form: AttentionForm, new: Segment) -> int:
    """Return the first position of the first block that a slot's new tokens see."""
    seen = max(0, new.first_position + 1 - form.window) if form.window else 0
    return seen // BLOCK_TOKENS * BLOCK_TOKENS


def kept_keys(layer: CachedAttention, slot: int, first: int, count: int) -> Tensor:
    """Return the stored keys of `count` tokens, (count, key dim), in a layer with one KV head.

    `first` must be the first position of a block. Keys are fp32 or bf16, as stored; int8 keys are
    returned in fp32.
    """
    assert first % BLOCK_TOKENS == 0
    assert layer.form.num_kv_heads == 1
    dtype, dim = _KEPT_DTYPES[layer.kv_dtype], layer.form.key_dim
    width = -(-dim // 4) * 4
    num_dwords = width * dtype.itemsize // _DWORD_BYTES
    blocks = torch.arange(first // BLOCK_TOKENS, -(-(first + count) // BLOCK_TOKENS), device="cpu")
    blocks %= layer.keys.shape[2]  # a ring if the layer has a window
    dwords = layer.keys[slot, 0, blocks].view(torch.int32)  # (blocks, dwords and scales)
    # A block's dwords are (dword of the key, position): see csrc/kv_layout.hpp.
    codes = dwords[:, : num_dwords * BLOCK_TOKENS].unflatten(1, (num_dwords, BLOCK_TOKENS))
    keys = codes.transpose(1, 2).contiguous().view(dtype)  # (blocks, positions, width)
    if dtype == torch.uint8:
        scales = dwords[:, num_dwords * BLOCK_TOKENS :].contiguous().view(torch.float32)
        keys = (keys.float() - _INT8_OFFSET) * scales[:, :, None]
    found: Tensor = keys.flatten(0, 1)[:count, :dim]
    return found

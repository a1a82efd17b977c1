"""Windows of models with compressed keys, on a GPU: rings of the last positions, and keys.

A key is its own value, and all heads share it. A ring keeps position p at p modulo the ring's size,
so that its memory does not grow with the text; a margin allows slots to go back. Compressed keys
are stored after the ring; an index into this memory of a slot is called a place. In a step, each
token attends to the places of its window and of the selected keys. The step's shapes depend only on
its size, so that the step can be captured.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.hf.kv_sizes import ring_size
from tandem.kernels.attention import Segment
from tandem.kv_cache.attention_call import AttentionCall
from tandem.kv_cache.cuda.attention import attention, attention_in_pieces, visible
from tandem.kv_cache.cuda.index_keys import (
    are_whole,
    last_of_blocks,
    num_keys,
    number_of_key,
    whole_keys,
)
from tandem.kv_cache.cuda.layers import DecodeKernels, LayerMemory, StepPlaces, stored_dtype
from tandem.kv_cache.index_keys import Zeros
from tandem.kv_cache.windows import Rings


class _Layer(NamedTuple):
    memory: LayerMemory
    window: int
    ratio: int
    """Tokens per compressed key; 0: the layer has only its window."""

    @property
    def ring(self) -> int:
        """The ring's size: the number of places before the compressed keys."""
        return ring_size(self.window)

    def num_places(self, num_tokens: int) -> int:
        """Return how many places, from the first on, a slot of `num_tokens` tokens uses."""
        return self.ring + (num_tokens // self.ratio if self.ratio else 0)


class DeviceWindows:
    """Stores the keys of a model's layers with a window, some with compressed keys, and attends."""

    def __init__(
        self, num_slots: int, zeros: Zeros, kv_dtype: str, kernels: DecodeKernels | None = None
    ) -> None:
        """Start empty, for `num_slots` slots; layers are added when the model uses them.

        In decode steps `kernels` attend; if they are None, torch does.
        """
        self._kernels = kernels
        self._num_slots, self._zeros, self._kv_dtype = num_slots, zeros, kv_dtype
        self._capacity = 0
        self._layers: dict[int, _Layer] = {}
        self.rings = Rings(num_slots)

    @property
    def ring_bytes(self) -> int:
        """Bytes of the rings, which do not depend on lengths."""
        layers = self._layers.values()
        return sum(x.memory.num_bytes * x.ring // x.memory.capacity for x in layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of rings and compressed keys."""
        return sum(layer.memory.num_bytes for layer in self._layers.values())

    def reserve(self, capacity: int, used: int) -> None:
        """Make room for `capacity` tokens in each slot; keep the first `used` tokens' keys."""
        self._capacity = capacity
        for layer in self._layers.values():
            if layer.ratio:
                room = _room(layer.window, layer.ratio, capacity)
                layer.memory.grow(room, layer.num_places(used))

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the rings and the keys of slot `source`'s first `length` tokens to slot `target`."""
        for layer in self._layers.values():
            layer.memory.copy_prefix(source, target, layer.num_places(length))
        self.rings.follow(source, target)

    def invent(self, length: int) -> None:
        """Fill every slot with made-up keys for `length` tokens."""
        for layer in self._layers.values():
            layer.memory.invent(layer.num_places(length))
        for slot in range(self._num_slots):
            self.rings.begin_anew(slot, length)

    def of_prompt(self, number: int, segment: Segment, call: AttentionCall) -> Tensor:
        """Append a prompt's tokens to a layer; return attention (n_tokens, heads, dim)."""
        form, query, key, _, sinks, selected, new, _ = call
        layer, (slot, first, count) = self._layer(number, call), segment
        memory, ring, ratio, end = layer.memory, layer.ring, layer.ratio, first + count
        own = torch.arange(first, end, device=key.device)
        before = torch.arange(max(0, first + 1 - form.window), first, device=key.device)
        places, seen = [before % ring], [visible(own[:, None], before, form.window)]
        if new is not None:
            ends = last_of_blocks(new.key[0], first, ratio)[None]
            memory.store(slot, slice(ring + first // ratio, ring + end // ratio), ends, ends)
            places.append(ring + torch.arange(num_keys(end, ratio), device=key.device))
            seen.append(are_whole(own, ratio, end) if selected is None else selected)
        old = memory.keys_at(slot, torch.cat(places), key.dtype)
        keys = torch.cat([old, memory.as_kept(key)], 1)[None]  # (1, 1, places and tokens, dim)
        memory.store(slot, own[-ring:] % ring, key[:, -ring:], key[:, -ring:])
        mask = torch.cat([*seen, visible(own[:, None], own, form.window)], 1)[:, None]
        of_tokens = query.transpose(0, 1)[None]  # (1, n_tokens, heads, dim)
        heads = None if sinks is None else sinks.reshape(-1, 1)
        return attention_in_pieces(form, of_tokens, keys, keys, mask, heads)[0]

    def of_step(self, number: int, step: StepPlaces, length: int, call: AttentionCall) -> Tensor:
        """Append a step's tokens to a layer; return attention as `of_prompt` does.

        If no keys are selected, tokens see the compressed keys of the first `length` positions.
        """
        form, query, key, _, sinks, selected, new, _ = call
        layer, slots, positions = self._layer(number, call), step.slots, step.positions
        if self._kernels is not None:
            compressed = None if new is None else new.key
            return self._kernels.in_windows(
                form, layer.memory.where, slots, positions, query, key, compressed, selected,
                sinks, layer.memory.kind, layer.ring, layer.ratio,
            )  # fmt: skip
        memory, ring, tokens = layer.memory, layer.ring, key.transpose(0, 1)
        memory.store(slots, positions % ring, tokens, tokens)
        at = positions[:, None] + torch.arange(1 - form.window, 1, device=key.device)
        places = [torch.where(at >= 0, at % ring, -1)]
        if new is not None:
            tokens = new.key.transpose(0, 1)
            ended = number_of_key(positions, layer.ratio, memory.capacity - ring)
            memory.store(slots, ring + ended, tokens, tokens)
            keys = whole_keys(positions, layer.ratio, length) if selected is None else selected
            places.append(torch.where(keys >= 0, ring + keys, -1))
        return self._attend(memory, slots, torch.cat(places, 1), call)

    def _attend(
        self, memory: LayerMemory, slots: Tensor, places: Tensor, call: AttentionCall
    ) -> Tensor:
        """Return attention to places (n_tokens, most) of the tokens' slots; -1: no place."""
        query, sinks = call.query, call.sinks
        keys = memory.keys_at(slots[:, None], places.clamp(min=0), query.dtype)
        keys = keys.transpose(1, 2)  # (n_tokens, 1, most, dim)
        of_tokens = query.transpose(0, 1)[:, None]  # (n_tokens, 1, heads, dim)
        heads = None if sinks is None else sinks.reshape(1, -1, 1)
        mask = (places >= 0)[:, None, None]
        return attention(call.form, of_tokens, keys, keys, mask, heads)[:, 0]

    def _layer(self, number: int, call: AttentionCall) -> _Layer:
        """Return layer `number`; on its first use, create it for the call's form and dtype."""
        if number not in self._layers:
            form, new = call.form, call.compressed
            dtype = stored_dtype(self._kv_dtype, call.key.dtype)
            ratio = 0 if new is None else new.ratio
            num_places = _room(form.window, ratio, self._capacity)
            with torch.inference_mode(False):
                memory = LayerMemory(
                    form, self._num_slots, num_places, dtype, self._zeros, has_values=False
                )
            self._layers[number] = _Layer(memory, form.window, ratio)
            self.rings.add(form.window)
        return self._layers[number]


def _room(window: int, ratio: int, num_tokens: int) -> int:
    """Return the number of places for `num_tokens` tokens of a slot: its ring, keys and one more.

    The additional place is for keys of tokens that end no window; see `number_of_key`. Without
    compressed keys (`ratio` 0), there is only the ring.
    """
    return ring_size(window) + (-(-num_tokens // ratio) + 1 if ratio else 0)

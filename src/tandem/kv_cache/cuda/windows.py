"""Windows of models with compressed keys, on a GPU: rings of the last positions, and keys beside.

A key is its value, too, and all heads have it. A ring keeps a position at its remainder by the
ring's size, with a margin for slots that go back, so that its memory does not grow with a text. A
step attends to a copy of what each of its tokens sees: its window, and the keys that are selected.
Its shapes depend on the step's alone, so it can be captured.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.hf.kv_sizes import ring_size
from tandem.kernels.attention import AttentionForm, Segment
from tandem.kv_cache.attention_call import AttentionCall
from tandem.kv_cache.cuda.attention import attention, attention_in_pieces, visible
from tandem.kv_cache.cuda.index_keys import are_whole, last_of_blocks, num_keys, number_of_key
from tandem.kv_cache.cuda.layers import LayerMemory, StepPlaces, stored_dtype
from tandem.kv_cache.index_keys import Zeros


class _Layer(NamedTuple):
    window: int
    ring: LayerMemory
    keys: LayerMemory | None
    """Of every `ratio` tokens one; None: the layer has its window alone."""
    ratio: int


class DeviceWindows:
    """The layers of a model that have a window, of which some have compressed keys."""

    def __init__(self, num_slots: int, zeros: Zeros, kv_dtype: str) -> None:
        """Hold nothing for so many slots; layers come as the model asks for them."""
        self._num_slots, self._zeros, self._kv_dtype = num_slots, zeros, kv_dtype
        self._capacity = 0
        self._layers: dict[int, _Layer] = {}
        self._ends = [0] * num_slots  # before which positions of a slot were written since it began

    @property
    def ring_bytes(self) -> int:
        """Bytes of the rings, however long texts are."""
        return sum(layer.ring.num_bytes for layer in self._layers.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of rings and compressed keys."""
        keys = (layer.keys for layer in self._layers.values())
        return self.ring_bytes + sum(x.num_bytes for x in keys if x is not None)

    def note_written(self, slot: int, end: int) -> None:
        """Note that a step writes positions of a slot up to an end, an idle row's among them."""
        self._ends[slot] = max(self._ends[slot], end)

    def reaches(self, slot: int, length: int) -> bool:
        """Tell whether a slot still has what the token after its first `length` sees."""
        return all(
            self._ends[slot] - ring_size(window) <= max(0, length + 1 - window)
            for window in {layer.window for layer in self._layers.values()}
        )

    def begin_anew(self, slot: int) -> None:
        """Let a slot hold nothing."""
        self._ends[slot] = 0

    def reserve(self, capacity: int, used: int) -> None:
        """Make room for the keys of `capacity` tokens in each slot, of which `used` are kept."""
        self._capacity = capacity
        for layer in self._layers.values():
            if layer.keys is not None:
                layer.keys.grow(_room(capacity, layer.ratio), used // layer.ratio)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Let a slot begin with the first `length` tokens of another one."""
        for layer in self._layers.values():
            layer.ring.copy_prefix(source, target, ring_size(layer.window))
            if layer.keys is not None:
                layer.keys.copy_prefix(source, target, length // layer.ratio)
        self._ends[target] = self._ends[source]

    def invent(self, length: int) -> None:
        """Fill what all slots have of their first tokens with invented numbers."""
        for layer in self._layers.values():
            layer.ring.invent(ring_size(layer.window))
            if layer.keys is not None:
                layer.keys.invent(length // layer.ratio)
        self._ends = [length] * self._num_slots

    def of_prompt(self, number: int, segment: Segment, call: AttentionCall) -> Tensor:
        """Append a prompt's tokens of one slot to a layer; attend: (n_tokens, heads, dim)."""
        form, query, key, _, sinks, selected, new = call
        layer, (slot, first, count) = self._layer(number, call), segment
        size, end = ring_size(form.window), first + count
        at = torch.arange(max(0, first + 1 - form.window), end, device=key.device)
        before, own = at[: len(at) - count], at[len(at) - count :]
        old = layer.ring.keys_at(slot, before % size, key.dtype)
        keys = torch.cat([old, layer.ring.as_kept(key)], 1)  # (1, positions, dim)
        layer.ring.store(slot, own[-size:] % size, key[:, -size:], key[:, -size:])
        mask = visible(own[:, None], at, form.window)
        if layer.keys is not None and new is not None:
            ratio = layer.ratio
            ends = last_of_blocks(new.key[0], first, ratio)[None]
            layer.keys.store(slot, slice(first // ratio, end // ratio), ends, ends)
            more, _ = layer.keys.read(slot, num_keys(end, ratio), key.dtype)
            seen = are_whole(own, ratio, end) if selected is None else selected
            keys, mask = torch.cat([keys, more], 1), torch.cat([mask, seen], 1)
        of_tokens = query.transpose(0, 1)[None]  # (1, n_tokens, heads, dim)
        heads = None if sinks is None else sinks.reshape(-1, 1)
        return attention_in_pieces(form, of_tokens, keys[None], keys[None], mask[:, None], heads)[0]

    def of_step(
        self,
        number: int,
        places: StepPlaces,
        read: slice | Tensor,
        length: int,
        call: AttentionCall,
    ) -> Tensor:
        """Append a step's tokens to a layer; attend as of `of_prompt`.

        What is not selected they see of the first `length` positions; `read` chooses whose keys
        each row reads, as of `StaticKvCache`.
        """
        form, query, key, _, sinks, selected, new = call
        layer, slots, positions = self._layer(number, call), places.slots, places.positions
        size, tokens = ring_size(form.window), key.transpose(0, 1)
        layer.ring.store(slots, positions % size, tokens, tokens)
        at = positions[:, None] + torch.arange(1 - form.window, 1, device=key.device)
        keys, mask = layer.ring.keys_at(slots[:, None], at % size, key.dtype)[:, :, 0], at >= 0
        if layer.keys is not None and new is not None:
            numbers = number_of_key(positions, layer.ratio, layer.keys.capacity)
            tokens = new.key.transpose(0, 1)
            layer.keys.store(slots, numbers, tokens, tokens)
            if selected is None:
                more = layer.keys.read(read, num_keys(length, layer.ratio), key.dtype)[0][:, 0]
                seen = are_whole(positions, layer.ratio, length)
            else:
                chosen = selected.clamp(min=0)
                more = layer.keys.keys_at(slots[:, None], chosen, key.dtype)[:, :, 0]
                seen = selected >= 0
            keys = torch.cat([keys, more.expand(len(slots), -1, -1)], 1)
            mask = torch.cat([mask, seen], 1)
        of_rows = query.transpose(0, 1)[:, None]  # (n_rows, 1, heads, dim)
        heads = None if sinks is None else sinks.reshape(1, -1, 1)
        own = keys[:, None]
        return attention(form, of_rows, own, own, mask[:, None, None], heads)[:, 0]

    def _layer(self, number: int, call: AttentionCall) -> _Layer:
        """Return a layer, which is made on first use."""
        if number not in self._layers:
            form, new = call.form, call.compressed
            ratio = 0 if new is None else new.ratio
            dtype = stored_dtype(self._kv_dtype, call.key.dtype)
            with torch.inference_mode(False):
                ring = self._memory(form, ring_size(form.window), dtype)
                keys = self._memory(form, _room(self._capacity, ratio), dtype) if ratio else None
            self._layers[number] = _Layer(form.window, ring, keys, ratio)
        return self._layers[number]

    def _memory(self, form: AttentionForm, capacity: int, dtype: torch.dtype) -> LayerMemory:
        return LayerMemory(form, self._num_slots, capacity, dtype, self._zeros, has_values=False)


def _room(capacity: int, ratio: int) -> int:
    """Return for how many keys a slot has room: one more, see `number_of_key`."""
    return -(-capacity // ratio) + 1

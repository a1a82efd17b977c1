"""The KV cache of sequence slots on the CPU; the cost of a step depends on the slots' lengths.

A forward computes tokens of several slots as one sequence; only attention distinguishes the slots.
A batch therefore needs no padding, and slots may be at any position. Layers with a sliding window
keep their last positions in rings ([windows](windows.py)).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tandem.core.errors import CapacityError
from tandem.core.units import format_bytes
from tandem.experts.store import host_memory
from tandem.hf.kv_sizes import ring_size, whole_granules
from tandem.kernels.attention import AttentionForm, CachedAttention, Segment, require_kv_dtype
from tandem.kernels.dense import VALUE_DTYPES, CpuThreads
from tandem.kernels.opaque_calls import ATTENTION, SELECTION, STATES, opaque
from tandem.kernels.recurrent import LayerState, StateOperation, StateTokens
from tandem.kv_cache.attention_call import AttentionCall, OptionalTensors
from tandem.kv_cache.base import NotInSlotsError, SlotCache
from tandem.kv_cache.compressed import CompressedStore
from tandem.kv_cache.cpu_states import CpuStates
from tandem.kv_cache.index_keys import IndexStore, NewIndexKeys
from tandem.kv_cache.latents import ExpandedKeys, Expansion
from tandem.kv_cache.states import StateKey
from tandem.kv_cache.windows import Rings, pieces_of_step

_INVENTED_AT_ONCE = 1024  # tokens
# Slots grow by 1 / _GROWTH of their size. Copying them then costs little compared with the steps in
# between, and little memory is unused.
_GROWTH = 32


class KvCache(SlotCache):
    """Keys and values of all layers on the CPU, for a fixed number of slots that grow."""

    keeps_latents = True
    states: CpuStates
    index_keys: IndexStore

    def __init__(
        self, threads: CpuThreads, num_slots: int, capacity: int, *, kv_dtype: str = "auto"
    ) -> None:
        """Start with `num_slots` empty slots, each with room for `capacity` tokens until they grow.

        `kv_dtype` is "fp32", "bf16" or "int8"; "auto" is the model's dtype.
        """
        super().__init__(num_slots)
        self.threads = threads
        self._kv_dtype = require_kv_dtype(kv_dtype)
        self._capacity = whole_granules(capacity)
        self._layers: dict[int, CachedAttention] = {}
        self._rings = Rings(num_slots)
        self.states = CpuStates(num_slots)
        self.index_keys = IndexStore(num_slots)
        self.index_keys.reserve(self._capacity, 0)
        self.compressed = CompressedStore(num_slots)
        self._expanded = ExpandedKeys()
        self._expected_bytes = 0
        self._prompt_lengths = torch.zeros(num_slots, dtype=torch.int64, device="cpu")
        self.slots = self.positions = torch.zeros(0, dtype=torch.int64, device="cpu")

    @property
    def num_bytes(self) -> int:
        """The KV cache's current size in bytes."""
        kept = sum(layer.num_bytes for layer in self._layers.values()) + self.compressed.num_bytes
        return kept + self.states.num_bytes + self.index_keys.num_bytes + self._expanded.num_bytes

    @property
    def filled_bytes(self) -> int:
        """Bytes that a decode step of all slots reads: keys, values, index and compressed keys."""
        return sum(
            layer.bytes_of(layer.form.most_seen(length))
            for layer in self._layers.values()
            for length in self.lengths
        ) + sum(map(self._read_bytes, self.lengths))

    def _read_bytes(self, length: int) -> int:
        """Return the bytes of index keys and compressed keys that a token reads.

        `length` is the number of tokens in the token's slot.
        """
        compressed = self.compressed.read_bytes(length, self.index_keys)
        return self.index_keys.read_bytes(length) + compressed

    def can_move(self, num_tokens: int) -> bool:
        """Tell whether segments of `num_tokens` tokens can be moved out of slots and in again.

        They can if they fill whole blocks in every layer used so far; False if no layer was used.
        States are ignored, because they do not belong to single tokens.
        """
        blocks = self.index_keys.blocks | self.compressed.ratios
        return bool(self._layers) and all(num_tokens % n == 0 for n in blocks)

    def layers_of(self, slot: int) -> list[tuple[CachedAttention, int]]:
        """Return all layers in order, each with the first position that it still has of a slot."""
        layers = [self._layers[number] for number in sorted(self._layers)]
        windows = [layer.form.kept_window for layer in layers]
        firsts = [self._rings.first(slot, window) if window else 0 for window in windows]
        return list(zip(layers, firsts, strict=True))

    def begin(self, segments: Sequence[Segment]) -> None:
        """Announce the next forward's tokens, which must follow the contents of their slots."""
        self._announce(segments, is_decoding=False)
        self.slots = torch.tensor(
            [s.slot for s in segments for _ in range(s.num_tokens)], device="cpu"
        )
        self.positions = torch.cat(
            [
                torch.arange(s.first_position, s.first_position + s.num_tokens, device="cpu")
                for s in segments
            ]
        )
        self._make_room()
        self.states.begin(segments)

    def begin_decode(self, counts: Mapping[int, int], slots: Tensor, positions: Tensor) -> None:
        """Announce the next tokens of some slots; `counts` has their number by slot.

        Fills `slots` and `positions` (n_tokens,) int64 with each token's slot and position. A
        recorded step refers to these tensors, so the caller must keep one pair for each n_tokens.
        All but the first token of a slot may be taken back by `truncate`.
        """
        segments = [Segment(slot, self.lengths[slot], n) for slot, n in counts.items()]
        self._announce(segments, is_decoding=True)
        self._make_room()
        places = [(s.slot, s.first_position + i) for s in segments for i in range(s.num_tokens)]
        slots.copy_(torch.tensor([slot for slot, _ in places], device="cpu"))
        positions.copy_(torch.tensor([position for _, position in places], device="cpu"))
        self.slots, self.positions = slots, positions
        self.states.begin_step(segments)

    def _make_room(self) -> None:
        ends = {s.slot: s.first_position + s.num_tokens for s in self._segments}
        self.reserve(max(ends.values()))
        for slot, end in ends.items():
            self._rings.note_written(slot, end)

    def _announce(self, segments: Sequence[Segment], *, is_decoding: bool) -> None:
        super()._announce(segments, is_decoding=is_decoding)
        prompt_lengths = self._prompt_lengths.numpy()
        for segment in segments:
            prompt_lengths[segment.slot] = self._prompt_length(segment)
            self._expanded.note_written(segment.slot, segment.first_position)

    def _copy_layers(self, source: int, target: int, length: int) -> None:
        for layer in self._layers.values():
            layer.copy_prefix(source, target, length)
        self.compressed.copy_prefix(source, target, length)
        self._expanded.note_written(target, 0)
        self._rings.follow(source, target)

    def reachable(self, slot: int, length: int) -> int:
        """Return how many of a slot's first `length` tokens the slot can continue from.

        0 if the ring of a layer no longer has a position that the next token sees. In a model with
        states, the result may be only the length of the longest checkpoint.
        """
        length = super().reachable(slot, length)
        return length if self._rings.reaches(slot, length) else 0

    def cut(self, slot: int, length: int) -> bool:
        """Forget a slot's tokens from `length` on, so that a caller can write other tokens there.

        The slot's states are lost: `states.put_in` must be called before the next step. Returns
        False, and forgets nothing, if the ring of a layer no longer has a position that the next
        token sees; otherwise True.
        """
        if not self._rings.reaches(slot, length):
            return False
        if self.states:
            self.states.lose(slot, length)
        self._forget(slot, length)
        return True

    def _forget(self, slot: int, length: int) -> None:
        super()._forget(slot, length)
        if length == 0:
            self._rings.begin_anew(slot)

    def _invent(self, length: int) -> None:
        self._expanded.clear()
        for slot in range(len(self.lengths)):
            self._rings.begin_anew(slot, length)
            for layer, first in self.layers_of(slot):
                _pretend(layer, self.threads, slot, range(first, length))
        self.compressed.pretend(length)

    def advance(
        self, key: StateKey, operation: Callable[[], StateOperation], *inputs: Tensor
    ) -> Tensor:
        """Advance a layer's states by the step's tokens; see `SlotCache.advance`."""
        state = self.states.layer(key, operation)
        return opaque(STATES, _advance, self, state, *inputs)

    def select(
        self, new: NewIndexKeys, key: Tensor, query: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Store the step's new index keys of a layer; return the positions that its tokens see.

        The result is as in `IndexStore.select`; tokens are in the order of `begin`.
        """
        return opaque(SELECTION, KvCache.select_of_layer, self, new, key, query, weights)

    def select_of_layer(
        self, new: NewIndexKeys, key: Tensor, query: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Do the work of `select`, which calls this function as an opaque call."""
        tokens = (self.slots, self.positions, self._segments)
        kept = self.index_keys.append(new, *tokens, key)
        return self.index_keys.select(kept, self._segments, new.selection, query, weights)

    @property
    def token_positions(self) -> Tensor:
        """The positions (n_tokens,) of the step's tokens in their slots."""
        return self.positions

    def attend(self, call: AttentionCall) -> Tensor:
        """Append the expected layer's keys and values; return attention (n_tokens, heads, dim)."""
        attention = self._layer_for(call)
        if call.selected is not None and call.form.window and call.compressed is None:
            raise NotInSlotsError("positions are selected within a window")
        tensors = (call.query, call.key, call.value, *call.optional_tensors)
        return opaque(ATTENTION, KvCache.attend_layer, self, attention, *tensors)

    def attend_layer(
        self,
        attention: CachedAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *more: Tensor,
    ) -> Tensor:
        """Do the work of `attend` for one layer; `more` are the call's `optional_tensors`."""
        optional, form = OptionalTensors.of(attention, more), attention.form
        out = query.new_empty((query.shape[1], form.num_heads, form.value_dim))
        for _, some in pieces_of_step(self._segments, form.kept_window):
            tokens, of = (self.threads, self.slots[some], self.positions[some]), optional.part(some)
            attention.append(*tokens, key[:, some], value[:, some], of.compressed)
            attention.attend(
                *tokens, query[:, some], of.selected, of.bias_states, of.sinks, out[some]
            )
        return out

    def attend_expanded(self, call: AttentionCall, expansion: Expansion) -> Tensor:
        """Append new latents; return attention to keys and values expanded from latents."""
        attention, form = self._layer_for(call), expansion.form
        out = call.query.new_empty((call.query.shape[1], form.num_heads, form.value_dim))
        for segments, some in pieces_of_step(self._segments, attention.form.kept_window):
            positions, own = self.positions[some], call.part(some)
            attention.append(self.threads, self.slots[some], positions, own.key, own.value)
            self._expanded.attend(
                self.threads, attention, segments, positions, own, expansion, out[some]
            )
        return out

    def _layer_for(self, call: AttentionCall) -> CachedAttention:
        """Return the expected layer; on its first use, create it for the call's form and dtype."""
        number, key = self._expected_layer(), call.key
        if key.dtype not in VALUE_DTYPES or key.shape[1] != len(self.positions):
            raise NotInSlotsError(f"keys are {key.dtype} of shape {tuple(key.shape)}")
        return self._layers.get(number) or self._add_layer(number, call)

    def _add_layer(self, layer: int, call: AttentionCall) -> CachedAttention:
        form, dtype = call.form, call.key.dtype
        attention = CachedAttention(
            form,
            dtype if self._kv_dtype == "auto" else self._kv_dtype,
            call.head_sinks,
            self._prompt_lengths,
            None if call.bias is None else call.bias.profiles,
            is_joint=self.has_compressed and bool(form.kept_window) and form.num_kv_heads == 1,
        )
        attention.has_token_sinks = call.token_sinks is not None
        if all(known.form.kept_window != form.kept_window for known in self._layers.values()):
            self._expect_kind(attention, _room(form, self._capacity))
        if form.kept_window:
            self._rings.add(form.kept_window)
        self._grow(attention, _room(form, self._capacity), 0)
        if call.compressed is not None:
            self._add_compressed(layer, attention, call.compressed.ratio)
        self._layers[layer] = attention
        return attention

    def _add_compressed(self, layer: int, attention: CachedAttention, ratio: int) -> None:
        compressed = attention.compress(ratio)
        self._require_bytes(compressed.bytes_of(self._capacity) * len(self.lengths))
        self.compressed.add(layer, compressed, self._capacity)

    def reserve(self, needed: int) -> None:
        """Make room for `needed` tokens in each slot; raises `CapacityError` if memory is short."""
        if needed <= self._capacity:
            return
        before = self._capacity
        self._capacity = whole_granules(max(needed, self._capacity * (_GROWTH + 1) // _GROWTH))
        # A ring of full size no longer grows.
        layers = [layer for layer in self._layers.values() if _room(layer.form, before) == before]
        try:
            self._require_memory(layers)
        except CapacityError:
            self._capacity = before
            raise
        for layer in layers:
            self._grow(layer, _room(layer.form, self._capacity), max(self.lengths))
        self.index_keys.reserve(self._capacity, max(self.lengths))
        self.compressed.reserve(self._capacity, max(self.lengths))

    def _require_memory(self, layers: list[CachedAttention]) -> None:
        """Raise `CapacityError` unless memory has room for `layers` of `_capacity` tokens per slot.

        Index keys and compressed keys are included. The copy of a layer that exists while it grows
        is not, because layers grow one after another.
        """
        needed = sum(layer.bytes_of(_room(layer.form, self._capacity)) for layer in layers)
        for kept in (self.index_keys, self.compressed):
            needed += kept.bytes_of(self._capacity)
        held = self.index_keys.num_bytes + self.compressed.num_bytes
        held += sum(layer.num_bytes for layer in layers)
        self._require_bytes(needed * len(self.lengths), held)

    def _expect_kind(self, attention: CachedAttention, capacity: int) -> None:
        """Raise `CapacityError` unless memory has room for all layers with this layer's window.

        Assumes that none of them is larger than `attention`. The layers of earlier calls are
        included; memory that layers have allocated already is not counted twice.
        """
        windows, window = list(self.windows_by_layer.values()), attention.form.kept_window
        count = windows.count(window) if window else self.num_layers - len(windows)
        self._expected_bytes += max(1, count) * attention.bytes_of(capacity) * len(self.lengths)
        self._require_bytes(self._expected_bytes, sum(x.num_bytes for x in self._layers.values()))

    def _require_bytes(self, needed: int, held: int = 0) -> None:
        """Raise `CapacityError` unless `needed` bytes fit; `held` of them are allocated already.

        Frees the keys expanded from latents before it gives up.
        """
        if needed - held > host_memory.available_bytes():
            self._expanded.clear()  # it can be computed again
        if needed - held > host_memory.available_bytes():
            raise self._no_room(needed, held)

    def _no_room(self, num_bytes: int, held: int = 0) -> CapacityError:
        available = host_memory.available_bytes() + held
        return CapacityError(
            f"a KV cache of {len(self.lengths)} slots of {self._capacity} tokens takes "
            f"{format_bytes(num_bytes)} and {format_bytes(available)} of host memory are free; "
            "use fewer prompts at once, shorter ones, a smaller max_new_tokens or kv_dtype='int8'"
        )

    def _grow(self, layer: CachedAttention, capacity: int, used: int) -> None:
        try:
            layer.reserve(len(self.lengths), capacity, used)
        except RuntimeError as error:  # torch's own message for this names a C++ file
            size = layer.bytes_of(capacity) * len(self.lengths) * self.num_layers
            raise self._no_room(size) from error


def _advance(cache: KvCache, state: LayerState, *inputs: Tensor) -> Tensor:
    tokens = StateTokens(cache.slots, cache.positions, cache.is_decoding)
    return cache.states.advance(cache.threads, state, tokens, inputs)


def _room(form: AttentionForm, capacity: int) -> int:
    """Return how many positions a layer stores per slot: `capacity`, or its ring's size if less."""
    return min(capacity, ring_size(form.kept_window)) if form.kept_window else capacity


def _pretend(layer: CachedAttention, threads: CpuThreads, slot: int, tokens: range) -> None:
    """Fill positions `tokens` of a layer's slot with made-up keys; the slot must have room."""
    count = min(len(tokens), _INVENTED_AT_ONCE)
    key, value = (
        torch.randn(layer.form.num_kv_heads, count, dim, device="cpu") * 0.1
        for dim in (layer.form.key_dim, layer.form.value_dim)
    )
    for first in tokens[::_INVENTED_AT_ONCE]:
        positions = torch.arange(first, min(first + count, tokens.stop), device="cpu")
        part = slice(0, len(positions))
        slots = torch.full_like(positions, slot)
        compressed = None if layer.compressed is None else key[:, part]
        layer.append(threads, slots, positions, key[:, part], value[:, part], compressed)

"""Keys and values on a GPU at fixed addresses, which a captured decode step can read.

Like `KvCache`, this cache has slots and needs no padding. Decode steps use kernels that look up
each sequence's length and each layer's memory on the device, so that nothing is captured again when
either grows. Without such kernels torch computes everything, also on the CPU. A step then reads the
filled positions, rounded up to a power of two (the *attended length*), with a mask.
"""

import gc
import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from tandem.core.errors import CapacityError
from tandem.core.units import format_bytes
from tandem.kernels.attention import AttentionForm, DistanceBias, Segment
from tandem.kernels.device_states import Run, StateKernels, TorchStates
from tandem.kernels.hyper_connections import StreamKernels
from tandem.kernels.recurrent import StateOperation
from tandem.kv_cache.attention_call import AttentionCall
from tandem.kv_cache.base import NotInSlotsError, SlotCache
from tandem.kv_cache.cuda.attention import BiasOf, attention
from tandem.kv_cache.cuda.index_keys import DeviceIndexKeys
from tandem.kv_cache.cuda.layers import (
    DecodeKernels,
    LayerMemory,
    StepPlaces,
    stored_dtype,
)
from tandem.kv_cache.cuda.prompts import attend_in_prompt, attend_to_latents
from tandem.kv_cache.cuda.states import DeviceStates
from tandem.kv_cache.cuda.windows import DeviceWindows
from tandem.kv_cache.index_keys import NewIndexKeys
from tandem.kv_cache.latents import Expansion
from tandem.kv_cache.states import StateKey

_SHORTEST_LENGTH = 256


class StaticKvCache(SlotCache):
    """Keys and values of all layers on a GPU, for a fixed number of slots that grow."""

    keeps_latents = shares_values = True
    states: DeviceStates
    index_keys: DeviceIndexKeys

    def __init__(
        self,
        num_slots: int,
        capacity: int,
        device: torch.device,
        make_room: Callable[[], bool] = lambda: False,
        *,
        kv_dtype: str = "auto",
        kernels: DecodeKernels | None = None,
        window_kernels: DecodeKernels | None = None,
        state_kernels: StateKernels | None = None,
        stream_kernels: StreamKernels | None = None,
    ) -> None:
        """Start with `num_slots` empty slots on `device`, with room for `capacity` tokens each.

        If memory is short, `make_room` is called; it must return whether it freed any. Keys and
        values are stored in `kv_dtype`. In decode steps, `kernels` attend, `window_kernels` attend
        to windows with compressed keys, `state_kernels` advance states, and `stream_kernels` mix
        residual streams. Where these are None, torch computes instead.
        """
        super().__init__(num_slots)
        self.stream_kernels = stream_kernels
        self.capacity = _rounded(capacity)
        self.generation = 0
        """Increases when captured steps become invalid. This happens when the slots grow, but only
        without kernels."""
        self.attended_length = 0 if kernels is not None else _SHORTEST_LENGTH
        """Positions of each slot that a decode step reads; 0: each token reads up to its own."""
        self._device = device
        self._make_room = make_room
        self._kv_dtype, self._kernels = kv_dtype, kernels
        self._layers: dict[int, LayerMemory] = {}
        self._places: dict[int, StepPlaces] = {}
        self._step = self.places(1)
        self._is_aligned = self._is_prompt = False
        zeros = partial(self._zeros, what="states")
        self.index_keys = DeviceIndexKeys(num_slots, self._zeros, window_kernels)
        self.index_keys.reserve(self.capacity, 0)
        self.states = DeviceStates(num_slots, state_kernels or TorchStates(), zeros, device)
        self.windows = DeviceWindows(num_slots, self._zeros, kv_dtype, window_kernels)
        self.windows.reserve(self.capacity, 0)

    @property
    def has_kernels(self) -> bool:
        """Whether decode steps use Triton kernels wherever these apply."""
        return self.stream_kernels is not None

    @property
    def num_bytes(self) -> int:
        """The KV cache's current size in bytes, including the states' checkpoints on the host."""
        return self.kv_bytes + self.states.num_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys, values, index keys and compressed keys."""
        kept = sum(layer.num_bytes for layer in self._layers.values()) + self.windows.num_bytes
        return kept + self.index_keys.num_bytes

    def begin(self, segment: Segment) -> None:
        """Announce the next tokens of a prompt in one slot."""
        assert segment.first_position == self.lengths[segment.slot]
        self._announce([segment], is_decoding=False)
        self.slots = torch.full((segment.num_tokens,), segment.slot, device="cpu")
        end = segment.first_position + segment.num_tokens
        self.reserve(end)
        self.windows.rings.note_written(segment.slot, end)
        self.states.begin_prompt(segment)

    def places(self, num_tokens: int) -> StepPlaces:
        """Return the `StepPlaces` of steps of `num_tokens` tokens: one object for each size."""
        if num_tokens not in self._places:
            self._places[num_tokens] = StepPlaces(num_tokens, self._device)
        return self._places[num_tokens]

    @property
    def form(self) -> tuple[int, bool, bool]:
        """The attended length, whether token i reads slot i, and whether states have logs.

        A captured step is valid for one size and form. With kernels the form does not change.
        """
        return self.attended_length, self._is_aligned, self.states.have_log

    def begin_decode(self, counts: Mapping[int, int], num_tokens: int) -> None:
        """Announce the next tokens of some slots (`counts` by slot), and queue the step's inputs.

        Padding tokens fill the step up to `num_tokens`. They write after the tokens of the shortest
        slot, whose length does not change. All but the first token of a slot may be taken back by
        `truncate`.
        """
        segments = [Segment(slot, self.lengths[slot], n) for slot, n in counts.items()]
        self._announce(segments, is_decoding=True)
        self._is_prompt = False
        tokens = [(s.slot, s.first_position + i) for s in segments for i in range(s.num_tokens)]
        ends = [length + counts.get(slot, 0) for slot, length in enumerate(self.lengths)]
        end, idle = min((end, slot) for slot, end in enumerate(ends))
        longest = max(position for _, position in tokens)
        self.reserve(max(longest, end) + 1)
        slots, positions = zip(*tokens, *[(idle, end)] * (num_tokens - len(tokens)), strict=True)
        self.slots = torch.tensor(slots, device="cpu")
        self._step = self.places(num_tokens)
        for slot, position in zip(slots, positions, strict=True):
            self.windows.rings.note_written(slot, position + 1)
        runs = self.states.begin_decode(segments, self._step)
        self._step.upload(slots, positions, runs, [self.prompt_lengths[slot] for slot in slots])
        if self._kernels is not None:
            return
        self._is_aligned = slots == tuple(range(num_tokens))
        self.attended_length = min(max(_SHORTEST_LENGTH, 1 << longest.bit_length()), self.capacity)

    @property
    def takes_prompt_steps(self) -> bool:
        """Whether prompts can be announced by `begin_prompt_step`; False before any forward."""
        layers = self._layers.values()
        plain = self._kernels is not None and all(layer.has_values for layer in layers)
        others = self.states or self.has_compressed or self.prompt_windows
        return plain and bool(layers) and not others

    def begin_prompt_step(self, slot: int, count: int, num_tokens: int) -> None:
        """Announce a prompt's next `count` tokens as a step of `num_tokens`, which kernels compute.

        The step has the inputs of a decode step, so that it can be captured. Padding tokens come
        last; all of them write to the position after the prompt's tokens.
        """
        first = self.lengths[slot]
        self._announce([Segment(slot, first, count)], is_decoding=True)
        self._is_prompt = True
        self.reserve(first + count + 1)
        positions = [min(first + at, first + count) for at in range(num_tokens)]
        self.slots = torch.full((num_tokens,), slot, device="cpu")
        self._step = self.places(num_tokens)
        nothing = Run(*[0] * len(Run._fields))
        self._step.upload([slot] * num_tokens, positions, [nothing] * num_tokens, [0] * num_tokens)

    def _prompt_length(self, segment: Segment) -> int:
        if self._is_prompt and self.is_decoding:
            return segment.first_position + segment.num_tokens
        return super()._prompt_length(segment)

    def _copy_layers(self, source: int, target: int, length: int) -> None:
        for layer in self._layers.values():
            layer.copy_prefix(source, target, length)
        self.windows.copy_prefix(source, target, length)

    def reachable(self, slot: int, length: int) -> int:
        """Return how many of a slot's first `length` tokens the slot can continue from.

        0 if the ring of a layer no longer has a position that the next token sees. In a model with
        states, the result may be only the length of the longest checkpoint.
        """
        length = super().reachable(slot, length)
        return length if self.windows.rings.reaches(slot, length) else 0

    def _forget(self, slot: int, length: int) -> None:
        super()._forget(slot, length)
        if length == 0:
            self.windows.rings.begin_anew(slot)

    def advance(
        self, key: StateKey, operation: Callable[[], StateOperation], *inputs: Tensor
    ) -> Tensor:
        """Advance a layer's states by the step's tokens; see `SlotCache.advance`."""
        return self.states.advance(key, operation, inputs)

    def _invent(self, length: int) -> None:
        for layer in self._layers.values():
            layer.invent(length)
        self.windows.invent(length)

    def select(
        self, new: NewIndexKeys, key: Tensor, query: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Store the step's new index keys of a layer; return a mask of what its tokens see.

        The mask is (n_tokens, positions), or (n_tokens, heads, positions) if each head selects for
        itself. If a decode step selects keys, the result has the numbers of the keys instead, as in
        `DeviceIndexKeys.of_step`.
        """
        if self._kernels is not None:
            raise NotInSlotsError("kernels attend to all positions")
        if not self.is_decoding:
            return self.index_keys.of_prompt(new, self._segments[0], key, query, weights)
        length, read = self.attended_length, self._read_slots()
        return self.index_keys.of_step(new, self._step, read, length, key, query, weights)

    @property
    def token_positions(self) -> Tensor:
        """The positions (n_tokens,) of the step's tokens in their slots, on the device."""
        if self.is_decoding:
            return self._step.positions
        _, first, count = self._segments[0]
        return torch.arange(first, first + count, device=self._device)

    def attend(self, call: AttentionCall) -> Tensor:
        """Append the expected layer's keys and values; return attention (n_tokens, heads, dim)."""
        if self.has_compressed:
            return self._attend_in_windows(call)
        call = _with_mask(call)
        if self.is_decoding:
            return self._decode(call, self._layer(call))
        keys, values = self._appended(call)
        attend = attend_to_latents if call.value.shape[2] == 0 else attend_in_prompt
        return attend(call, keys, values)

    def _attend_in_windows(self, call: AttentionCall) -> Tensor:
        """Compute `attend` for a model in which some layers have compressed keys."""
        number = self._expected_layer()
        if not call.form.window or call.form.num_kv_heads > 1 or self._kernels is not None:
            raise NotInSlotsError("compressed keys stand beside no window of one head's keys")
        if not self.is_decoding:
            return self.windows.of_prompt(number, self._segments[0], call)
        return self.windows.of_step(number, self._step, self.attended_length, call)

    def absorbs(self, kept: AttentionForm, expanded: AttentionForm) -> bool:
        """Tell whether the step's tokens attend to latents as stored.

        In a prompt this is cheaper than expanding the latents if few tokens follow a long text. The
        two costs are compared in multiplications per head and position.
        """
        if self.is_decoding:
            return True
        _, first, count = self._segments[0]
        rotary = kept.key_dim - kept.value_dim
        expanding = kept.value_dim * (expanded.key_dim - rotary + expanded.value_dim)
        wider = kept.key_dim + kept.value_dim - expanded.key_dim - expanded.value_dim
        return first > 0 and count * wider < expanding

    def attend_expanded(self, call: AttentionCall, expansion: Expansion) -> Tensor:
        """Append new latents; return attention to keys and values expanded from latents."""
        kept, _ = self._appended(call)
        call = _with_mask(call)._replace(form=expansion.form)
        return attend_in_prompt(call, *expansion.expand(kept[0]))

    def _appended(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Append a prompt's next tokens to its slot; return all of the slot's keys and values."""
        layer, key, value = self._layer(call), call.key, call.value
        slot, first, count = self._segments[0]
        if key.shape[1] != count:
            raise NotInSlotsError(f"{count} tokens were announced and {key.shape[1]} came")
        layer.store(slot, slice(first, first + count), key, value)
        return layer.read(slot, first + count, key.dtype)

    def _decode(self, call: AttentionCall, layer: LayerMemory) -> Tensor:
        form, query, key, value, sinks, selected, _, bias = call
        slots, positions = self._step.slots, self._step.positions
        count = len(slots)
        if self._kernels is not None:
            tokens = (query, key, value, sinks)
            prompts = self._step.prompt_lengths
            return self._kernels(
                form, layer.where, slots, positions, *tokens, layer.kind, prompts, bias,
                self._is_prompt,
            )  # fmt: skip
        layer.store(slots, positions, key.transpose(0, 1), value.transpose(0, 1))
        keys, values = layer.read(self._read_slots(), self.attended_length, query.dtype)
        keys, values = (x.expand(count, -1, -1, -1) for x in (keys, values))
        group = form.num_heads // form.num_kv_heads
        # Heads that share keys stand as several queries of one head: all see the same positions.
        q = query.transpose(0, 1).reshape(count, form.num_kv_heads, group, form.key_dim)
        mask = self._step.mask(form, self.capacity)[..., : self.attended_length]
        if selected is not None:  # of all heads, or of each KV head
            mask = mask & selected.view(count, -1, 1, selected.shape[-1])
        sink = None if sinks is None else sinks.reshape(-1, form.num_kv_heads, group, 1)
        added = None if bias is None else self._bias_of_step(form, bias)
        out = attention(form, q, keys, values, mask, sink, added)
        return out.reshape(count, form.num_heads, form.value_dim)

    def _bias_of_step(self, form: AttentionForm, bias: DistanceBias) -> BiasOf:
        positions = torch.arange(self.attended_length, device=self._device)
        added = bias.at(self._step.positions[:, None] - positions).transpose(0, 1)
        # (n_tokens, KV heads, heads of one, positions): heads of a KV head stand as queries
        whole = added.unflatten(1, (form.num_kv_heads, -1))
        return lambda some: whole[:, :, some]

    def _layer(self, call: AttentionCall) -> LayerMemory:
        """Return the expected layer; on its first use, create it for the call's form and dtype."""
        number = self._expected_layer()
        if number not in self._layers:
            stored = stored_dtype(self._kv_dtype, call.key.dtype)
            with torch.inference_mode(False):
                self._layers[number] = LayerMemory(
                    call.form, len(self.lengths), self.capacity, stored, self._zeros,
                    has_values=call.value.shape[-1] > 0,
                )  # fmt: skip
        return self._layers[number]

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype, what: str = "") -> Tensor:
        has_collected = False
        while True:
            try:
                return torch.zeros(shape, dtype=dtype, device=self._device)
            except torch.OutOfMemoryError as error:
                if not has_collected:  # slots and their steps know each other: some may wait
                    has_collected = True
                    gc.collect()
                elif not self._make_room():
                    what = what or _described(shape, dtype)
                    raise CapacityError(
                        f"the GPU has no memory for {what}; use fewer prompts at once, shorter "
                        "ones or more gpu_memory"
                    ) from error

    def reserve(self, needed: int) -> None:
        """Make room for `needed` tokens in each slot; raises `CapacityError` if memory is short."""
        if needed <= self.capacity:
            return
        capacity, used = _rounded(max(needed, self.capacity * 3 // 2)), max(self.lengths)
        if self._kernels is None:
            self.generation += 1
        with torch.inference_mode(False):
            for layer in self._layers.values():
                layer.grow(capacity, used)
            self.index_keys.reserve(capacity, used)
            self.windows.reserve(capacity, used)
        self.capacity = capacity  # only now: without memory for all layers the old one holds

    def _read_slots(self) -> slice | Tensor:
        """Return an index of the slots that the step's tokens read.

        The index is a slice if there is only one slot, or if token i reads slot i. Otherwise it is
        a tensor; reading with a tensor copies the slots.
        """
        if len(self.lengths) == 1:
            return slice(1)
        return slice(len(self._step.slots)) if self._is_aligned else self._step.slots


def _with_mask(call: AttentionCall) -> AttentionCall:
    """Return the call with its selection as a boolean mask; models' code turns it into integers."""
    return call if call.selected is None else call._replace(selected=call.selected != 0)


def _rounded(tokens: int) -> int:
    return -(-tokens // _SHORTEST_LENGTH) * _SHORTEST_LENGTH


def _described(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Describe a tensor for an error message; a tensor of four dimensions holds keys or values."""
    if len(shape) == 4:
        return f"a KV cache of {shape[0]} slots of {shape[2]} tokens"
    return f"{format_bytes(math.prod(shape) * dtype.itemsize)} of sequence slots"

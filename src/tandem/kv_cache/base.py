"""The interface of a KV cache of sequence slots, on any processor, to a model and its attention.

A layer's keys and values are stored when attention is called, not when the model "updates the
cache". Work that a model does on them in between, such as expanding a latent, is therefore done
once per token.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from tandem.hf.steps import SEQUENCES
from tandem.kernels.attention import AttentionForm, Segment
from tandem.kernels.recurrent import StateOperation
from tandem.kv_cache.attention_call import AttentionCall, NewCompressed
from tandem.kv_cache.index_keys import KeptIndexKeys, NewIndexKeys
from tandem.kv_cache.latents import Expansion
from tandem.kv_cache.states import KeptStates, StateHandle, StateKey


class NotInSlotsError(Exception):
    """A model does something that sequence slots do not support."""


class SlotCache(ABC):
    """A KV cache of sequence slots: keeps their lengths, and checks the order of a model's calls.

    In each layer, the call with the new keys must come before the call of attention.
    """

    keeps_latents = False
    """Whether latent attention stores its latents here, not the keys and values expanded from
    them."""
    shares_values = False
    """Whether latents are stored once, as keys; values then have zero dimensions."""
    is_decoding = False
    """Whether the announced tokens form a decode step, or a prompt step computed like one."""
    states: KeptStates[Any]
    """States of layers, besides keys and values."""
    index_keys: KeptIndexKeys
    """Index keys of layers with an indexer."""
    slots: Tensor
    """The slot of each token of the current step, on the host."""

    def __init__(self, num_slots: int) -> None:
        """Start with empty slots."""
        self.lengths = [0] * num_slots
        self.num_layers = 1
        """The number of layers that will store keys; memory for all is checked at the first one."""
        self.windows_by_layer: dict[int, int] = {}
        """Layer number -> window size, from Transformers' cache; only layers with a window."""
        self.prompt_windows: dict[int, int] = {}
        """Layer number -> window size, for layers whose tokens also see the slot's whole prompt."""
        self.prompt_lengths = [0] * num_slots
        """The number of prompt tokens in each slot; decoded tokens follow them."""
        self.has_compressed = False
        """Whether some layers keep compressed keys besides a window."""
        self.requested_state: StateHandle | None = None
        """The handle of the state that the model's code requested last; None: none in this step."""
        self._awaited: int | None = None
        self._compressed: NewCompressed | None = None
        self._segments: list[Segment] = []  # the announced segments

    def _announce(self, segments: Sequence[Segment], *, is_decoding: bool) -> None:
        """Record the next forward's segments; reset what the previous forward expected."""
        self._segments, self.is_decoding = list(segments), is_decoding
        self._awaited = self.requested_state = self._compressed = None

    def commit(self) -> None:
        """Add the announced tokens to the slots' lengths; must be called after the forward.

        Raises `NotInSlotsError` if a layer's keys were given without a call of its attention.
        """
        if self._awaited is not None:
            raise NotInSlotsError("keys were given, but attention was not requested")
        for segment in self._segments:
            self.lengths[segment.slot] = segment.first_position + segment.num_tokens
            self.prompt_lengths[segment.slot] = self._prompt_length(segment)
        self.states.commit()

    def _prompt_length(self, segment: Segment) -> int:
        """Return how many prompt tokens the segment's slot has once the segment is computed."""
        slot, first, count = segment
        return self.prompt_lengths[slot] if self.is_decoding else first + count

    @abstractmethod
    def attend(self, call: AttentionCall) -> Tensor:
        """Append the expected layer's keys and values; return attention (n_tokens, heads, dim)."""

    def absorbs(self, kept: AttentionForm, expanded: AttentionForm) -> bool:
        """Tell whether the step's tokens attend to latents as stored, not to expanded keys.

        `kept` is the form of attention to the latents, which all heads share; `expanded` is the
        form of attention to a key for each head.
        """
        return self.is_decoding

    def attend_expanded(self, call: AttentionCall, expansion: Expansion) -> Tensor:
        """Append new latents; return attention to keys and values expanded from the slots' latents.

        The call's query must be for expanded keys. Raises `NotInSlotsError` if latents are not
        kept.
        """
        raise NotInSlotsError("the model keeps latents in place of keys and values")

    @abstractmethod
    def advance(
        self, key: StateKey, operation: Callable[[], StateOperation], *inputs: Tensor
    ) -> Tensor:
        """Advance a layer's states by the step's tokens; return the outputs, by token.

        `operation` is called on the states' first use, and returns what advances them.
        """

    def select(
        self, new: NewIndexKeys, key: Tensor, query: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Store the step's new index keys of a layer; return the positions that its tokens see.

        The result is as in `IndexStore.select`. Raises `NotInSlotsError` if no index keys are kept.
        """
        raise NotInSlotsError("the model keeps index keys beside keys and values")

    @property
    @abstractmethod
    def token_positions(self) -> Tensor:
        """The positions (n_tokens,) of the step's tokens in their slots, on the model's device."""

    def expect(self, layer: int) -> None:
        """Record that a layer has new keys and values; its attention must be called next."""
        if self._awaited is not None:
            raise NotInSlotsError("keys were given twice before attention was requested")
        self._awaited = layer

    def expect_sharing(self, module: object) -> None:
        """Expect attention of `module`'s layer, unless `expect` has already named a layer.

        A layer that shares another layer's keys does not call `expect`. The shared keys are stored
        again for this layer, because a model may change them in each layer.
        """
        if self._awaited is None:
            self._awaited = vars(module).get("layer_idx")

    def expect_compressed(self, new: NewCompressed) -> None:
        """Record compressed keys, which tokens see besides the expected layer's own keys."""
        self._compressed = new

    def expected_compressed(self) -> NewCompressed | None:
        """Return and forget what `expect_compressed` recorded for this layer; None: nothing."""
        compressed, self._compressed = self._compressed, None
        return compressed

    @property
    def expected_window(self) -> int:
        """The window's size in the layer whose attention is expected; 0: it has no window."""
        if self._awaited is None:
            return 0
        return {**self.prompt_windows, **self.windows_by_layer}.get(self._awaited, 0)

    @property
    def expects_prompt(self) -> bool:
        """Whether tokens see the whole prompt in the layer whose attention is expected."""
        return self._awaited in self.prompt_windows

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """The KV cache's current size in bytes."""

    @abstractmethod
    def reserve(self, needed: int) -> None:
        """Make room for `needed` tokens in each slot; raises `CapacityError` if memory is short."""

    @torch.inference_mode()
    def pretend(self, length: int) -> None:
        """Fill every slot with `length` made-up tokens; a forward must have run before."""
        self.reserve(length + 1)
        self._invent(length)
        self.index_keys.pretend(length)
        self.lengths[:] = self.prompt_lengths[:] = [length] * len(self.lengths)

    @abstractmethod
    def _invent(self, length: int) -> None:
        """Fill the first `length` positions of all slots with made-up numbers, in all layers."""

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Replace the contents of slot `target` by the first `length` tokens of slot `source`.

        `source` must be able to continue from `length` tokens; see `reachable`.
        """
        assert length == self.reachable(source, length)
        self._copy_layers(source, target, length)
        self.index_keys.copy_prefix(source, target, length)
        self.states.go_back(source, target, length, self.lengths[source] - length)
        self.lengths[target] = length
        self.prompt_lengths[target] = min(length, self.prompt_lengths[source])

    @abstractmethod
    def _copy_layers(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`, in all layers."""

    def usable(self, slot: int, length: int) -> int:
        """Return how many of the slot's first `length` tokens a prompt can continue from.

        The result is as in `reachable`, but at most `seen_whole`.
        """
        return self.reachable(slot, min(length, self.seen_whole(slot)))

    def seen_whole(self, slot: int) -> int:
        """Return how many of a slot's first tokens have the same keys and values as in a prefill.

        These are all tokens, except in a model with `prompt_windows`. There a decoded token sees
        the earlier decoded tokens only within its window; in a prefill it sees them all.
        """
        windows = self.prompt_windows.values()
        return min([self.lengths[slot], *(self.prompt_lengths[slot] + w for w in windows)])

    def reachable(self, slot: int, length: int) -> int:
        """Return how many of a slot's first `length` tokens the slot can continue from.

        In a model with states, this may be only the length of the longest checkpoint; 0: none.
        """
        assert length <= self.lengths[slot]
        return self.states.usable(slot, length, self.lengths[slot])

    def truncate(self, slot: int, length: int) -> None:
        """Forget a slot's tokens from position `length` on.

        The slot must be able to continue from `length` tokens; see `reachable`.
        """
        assert length == self.reachable(slot, length)
        self.states.go_back(slot, slot, length, self.lengths[slot] - length)
        self._forget(slot, length)

    def _forget(self, slot: int, length: int) -> None:
        self.lengths[slot] = length
        self.prompt_lengths[slot] = min(length, self.prompt_lengths[slot])

    def _expected_layer(self) -> int:
        """Return the number of the layer whose attention is expected; reset the expectation.

        Raises `NotInSlotsError` if no attention is expected.
        """
        layer, self._awaited = self._awaited, None
        if layer is None:
            raise NotInSlotsError("attention was requested without new keys")
        return layer


# A model's code calls attention functions, which are registered by name, with only the module. They
# find the step under way here.
_CURRENT: ContextVar[SlotCache | None] = ContextVar("tandem_kv_cache", default=None)


def current_cache() -> SlotCache | None:
    """Return the KV cache of the step that runs in this thread; None outside steps."""
    return _CURRENT.get()


@contextmanager
def stepping(cache: SlotCache) -> Iterator[None]:
    """Make `cache` the current KV cache inside this context."""
    token, of_tokens = _CURRENT.set(cache), SEQUENCES.set(lambda: cache.slots)
    try:
        yield
    finally:
        _CURRENT.reset(token)
        SEQUENCES.reset(of_tokens)

"""What a model and its attention ask of the KV cache of sequence slots, wherever it lies.

A layer's keys and values are kept when attention is called, not when the model "updates the cache":
what a model does to them in between (expanding a latent, say) is done once per token.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from tandem.foreign_types import PreTrainedModel
from tandem.hf.compat import (
    cache_layer_kinds,
    compresses_windows,
    is_empty_cache_layer,
    own_cache_class,
)
from tandem.hf.steps import SEQUENCES
from tandem.kernels.attention import AttentionForm, Segment
from tandem.kernels.recurrent import StateOperation
from tandem.kv_cache.attention_call import AttentionCall, NewCompressed
from tandem.kv_cache.index_keys import KeptIndexKeys, NewIndexKeys, Pool, Selection
from tandem.kv_cache.indexers import IndexScores
from tandem.kv_cache.latents import Expansion
from tandem.kv_cache.states import KeptStates, StateHandle, StateKey

# Transformers' layers by what they keep.
_FULL_AND_STATES = cache_layer_kinds("LinearAttentionAndFullAttentionLayer")
_SLIDING_AND_STATES = cache_layer_kinds("LinearAttentionAndSlidingWindowAttentionLayer")
_SLIDING = (DynamicSlidingWindowLayer, *_SLIDING_AND_STATES)
_FULL = (DynamicLayer, DynamicIndexedLayer, *_FULL_AND_STATES)


class NotInSlotsError(Exception):
    """A model does something around its attention that sequence slots cannot have."""


class SlotCache(ABC):
    """Lengths of slots, and the order in which a model must ask: keys of a layer, its attention."""

    keeps_latents = False
    """Whether latent attention keeps its latents here, and not what is made of them."""
    shares_values = False
    """Whether latents are kept once: they come as keys, with values of no dimensions."""
    is_decoding = False
    """Whether the tokens that are announced are a decode step's."""
    states: KeptStates[Any]
    """What layers keep beside keys and values."""
    index_keys: KeptIndexKeys
    """What layers with an indexer keep beside them."""
    slots: Tensor
    """The slot of each token of the step that is under way, on the host."""

    def __init__(self, num_slots: int) -> None:
        """Hold slots without tokens."""
        self.lengths = [0] * num_slots
        self.num_layers = 1
        """Layers that are expected: their memory is asked for together."""
        self.num_sliding_layers = 0
        """How many of them see a window alone."""
        self.windows_by_layer: dict[int, int] = {}
        """What the layers of Transformers' cache keep, where that is a window."""
        self.has_compressed = False
        """Whether some of them keep compressed keys beside it."""
        self.states_asked_for: StateHandle | None = None
        """The states of the layer that the model asked for last."""
        self._awaited: int | None = None
        self._compressed: NewCompressed | None = None
        self._segments: list[Segment] = []  # that are announced

    def _announce(self, segments: Sequence[Segment], *, is_decoding: bool) -> None:
        """Note the tokens of the next forward, of which nothing has been asked for yet."""
        self._segments, self.is_decoding = list(segments), is_decoding
        self._awaited = self.states_asked_for = self._compressed = None

    def commit(self) -> None:
        """Count the announced tokens as held: the forward is through."""
        if self._awaited is not None:
            raise NotInSlotsError("keys were given, but attention was not asked for")
        for segment in self._segments:
            self.lengths[segment.slot] = segment.first_position + segment.num_tokens
        self.states.commit()

    @abstractmethod
    def attend(self, call: AttentionCall) -> Tensor:
        """Append the new keys and values of the expected layer; attend: (n_tokens, heads, dim)."""

    def absorbs(self, kept: AttentionForm, expanded: AttentionForm) -> bool:
        """Tell whether the step's tokens attend to latents as they are kept, or to expanded ones.

        `kept` is the form of the one key that all heads have, `expanded` that of a key for each.
        """
        return self.is_decoding

    def attend_expanded(self, call: AttentionCall, expansion: Expansion) -> Tensor:
        """Append new latents as of `attend`; attend to what slots keep of them, expanded.

        The query is one for expanded keys. Raises `NotInSlotsError` where latents are not kept.
        """
        raise NotInSlotsError("the model keeps latents in place of keys and values")

    @abstractmethod
    def advance(
        self, key: StateKey, operation: Callable[[], StateOperation], *inputs: Tensor
    ) -> Tensor:
        """Go on from a layer's states by the step's tokens; return what comes out, by token.

        `operation` says what these states are for, when they are first asked for.
        """

    def select(
        self, new: NewIndexKeys, key: Tensor, query: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Keep the step's new index keys of a layer; return the positions that its tokens see.

        As of `IndexStore.select`. Raises `NotInSlotsError` where no index keys are kept.
        """
        raise NotInSlotsError("the model keeps index keys beside keys and values")

    def expect(self, layer: int) -> None:
        """Note that a layer has new keys and values: its attention comes next."""
        if self._awaited is not None:
            raise NotInSlotsError("keys were given twice before attention was asked for")
        self._awaited = layer

    def expect_sharing(self, module: object) -> None:
        """Expect the layer of an attention module that gave no keys: it has those of another one.

        They are kept for it too, since what a model makes of them differs from layer to layer.
        """
        if self._awaited is None:
            self._awaited = vars(module).get("layer_idx")

    def expect_compressed(self, new: NewCompressed) -> None:
        """Note what the tokens of the expected layer see beside its own keys."""
        self._compressed = new

    def expected_compressed(self) -> NewCompressed | None:
        """Return what was noted for the layer whose attention is asked for now."""
        compressed, self._compressed = self._compressed, None
        return compressed

    @property
    def expected_window(self) -> int:
        """The window of the layer whose attention is expected, as its cache has it; 0: all."""
        return 0 if self._awaited is None else self.windows_by_layer.get(self._awaited, 0)

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes that the cache takes now."""

    @abstractmethod
    def reserve(self, needed: int) -> None:
        """Make room for `needed` tokens in each slot; raises `CapacityError` if there is none."""

    @torch.inference_mode()
    def pretend(self, length: int) -> None:
        """Let every slot hold `length` tokens that nobody said; needs a forward before it."""
        self.reserve(length + 1)
        self._invent(length)
        self.index_keys.pretend(length)
        self.lengths[:] = [length] * len(self.lengths)

    @abstractmethod
    def _invent(self, length: int) -> None:
        """Fill the first positions of all slots and layers."""

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Let a slot hold the first tokens of another one, in place of what it held."""
        assert length == self.usable(source, length)
        self._copy_layers(source, target, length)
        self.index_keys.copy_prefix(source, target, length)
        self.states.go_back(source, target, length, self.lengths[source] - length)
        self.lengths[target] = length

    @abstractmethod
    def _copy_layers(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of a slot to another one, in all layers."""

    def usable(self, slot: int, length: int) -> int:
        """Return with how many of the first `length` tokens that it holds a slot can go on.

        All; where layers keep states, as many as the longest checkpoint has.
        """
        assert length <= self.lengths[slot]
        return self.states.usable(slot, length, self.lengths[slot])

    def truncate(self, slot: int, length: int) -> None:
        """Forget a slot's tokens from `length` on, which is `usable`."""
        assert length == self.usable(slot, length)
        self.states.go_back(slot, slot, length, self.lengths[slot] - length)
        self._forget(slot, length)

    def _forget(self, slot: int, length: int) -> None:
        self.lengths[slot] = length

    def _expected_layer(self) -> int:
        """Return the layer whose attention is asked for now."""
        layer, self._awaited = self._awaited, None
        if layer is None:
            raise NotInSlotsError("attention was asked for without new keys")
        return layer


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """What Transformers' cache holds for a layer: it only passes the word on."""

    is_sliding = False

    def __init__(self, cache: SlotCache, layer: int) -> None:
        super().__init__()
        self._cache = cache
        self._layer = layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """No-op: the cache has its own tensors."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return what is new alone; attention knows the rest."""
        self._cache.expect(self._layer)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return max(self._cache.lengths)

    def get_max_length(self) -> int:
        return -1


class _SelectingLayer(_Layer):
    """The same for a layer that selects some of what attention sees."""

    def select(
        self,
        selection: Selection,
        key: Tensor,
        query: Tensor,
        weights: Tensor | None,
        pool: Pool | None = None,
    ) -> Tensor:
        """As of `SlotCache.select`, for tensors (b, n_tokens, ...)."""
        flat = None if weights is None else weights.flatten(0, 1)
        new = NewIndexKeys(self._layer, selection, pool)
        selected = self._cache.select(new, key.flatten(0, 1), query.flatten(0, 1), flat)
        return selected.view(*key.shape[:2], -1)


class _IndexedLayer(_SelectingLayer):
    """The same for a layer whose indexer selects the positions that attention sees."""

    def update_indexer(self, key_states: Tensor) -> IndexScores:
        """Return what stands for the index keys of each token's slot."""
        return IndexScores(self.select, key_states)

    @property
    def indexer_position_ids(self) -> None:
        """None: the positions of earlier tokens are not asked for again."""

    @indexer_position_ids.setter
    def indexer_position_ids(self, position_ids: Tensor) -> None:
        """No-op."""


class _CompressedLayer(_SelectingLayer):
    """The same for a layer with a window and, of all tokens, compressed keys."""

    def __init__(self, cache: SlotCache, layer: int) -> None:
        super().__init__(cache, layer)
        self.states = StateHandle(cache, layer, 0)

    def expect_compressed(self, ratio: int, key: Tensor, selected: Tensor | None) -> None:
        """Note the keys (b, n_tokens, dim) that attention sees beside those of the window."""
        self._cache.expect_compressed(NewCompressed(ratio, key.flatten(0, 1)[None], selected))


class _StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """The same for a layer with states: what it gives out are handles of ours."""

    def __init__(self, cache: SlotCache, layer: int, number_of_states: int) -> None:
        super().__init__(number_of_states)
        self._cache = cache
        self._handles = [StateHandle(cache, layer, i) for i in range(number_of_states)]
        self.conv_states = dict(enumerate(self._handles))
        self.recurrent_states = dict(enumerate(self._handles))
        self.has_previous_state = dict.fromkeys(range(number_of_states), True)

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        """Return what is new alone; the convolution knows the rest."""
        self._cache.states_asked_for = self._handles[state_idx]
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: object, state_idx: int = 0, **kwargs: object
    ) -> object:
        """No-op: the operation has written its state."""
        return recurrent_states


class _KeysAndStateLayer(_StateLayer, _Layer):
    """The same for a layer that keeps both."""

    def __init__(self, cache: SlotCache, layer: int, number_of_states: int) -> None:
        _Layer.__init__(self, cache, layer)
        _StateLayer.__init__(self, cache, layer, number_of_states)


def transformers_cache(model: PreTrainedModel, cache: SlotCache) -> DynamicCache:
    """Return the cache object for a forward; raises `NotInSlotsError` for layers of other kinds.

    Compressed caches and the like need their own kind.
    """
    shell = DynamicCache(config=model.config.get_text_config(decoder=True))
    kinds = [type(layer) for layer in shell.layers]
    cache.windows_by_layer = {
        number: layer.sliding_window
        for number, layer in enumerate(shell.layers)
        if type(layer) in _SLIDING or compresses_windows(layer)
    }
    cache.has_compressed = any(map(compresses_windows, shell.layers))
    cache.num_sliding_layers = len(cache.windows_by_layer)
    full = sum(kind in _FULL for kind in kinds)
    cache.num_layers = max(1, full + cache.num_sliding_layers)
    if not kinds:
        raise NotInSlotsError("the model keeps no keys and values")
    shell.layers = [_stand_in(cache, number, layer) for number, layer in enumerate(shell.layers)]
    own = own_cache_class(model)
    if own is not None:
        layers, shell = shell.layers, own()
        shell.layers = layers
    return shell


def sees_all(model: PreTrainedModel) -> bool:
    """Tell whether attention sees all positions before a token, of its window if a layer has one.

    Not where an indexer selects some, or keys of many tokens stand beside a window.
    """
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return not any(type(x) is DynamicIndexedLayer or compresses_windows(x) for x in layers)


def _stand_in(cache: SlotCache, number: int, layer: Any) -> Any:
    kind = type(layer)
    if kind in (DynamicLayer, DynamicSlidingWindowLayer):
        return _Layer(cache, number)
    if kind is DynamicIndexedLayer:
        return _IndexedLayer(cache, number)
    if compresses_windows(layer):
        return _CompressedLayer(cache, number)
    if kind in (*_FULL_AND_STATES, *_SLIDING_AND_STATES):
        return _KeysAndStateLayer(cache, number, layer.number_of_states)
    if kind is LinearAttentionLayer:
        return _StateLayer(cache, number, layer.number_of_states)
    if is_empty_cache_layer(layer):
        return layer
    raise NotInSlotsError(f"a layer's cache is a {kind.__name__}")


# Attention functions are registered by name and called by the model's code with the module alone:
# the step that is under way reaches them here.
_CURRENT: ContextVar[SlotCache | None] = ContextVar("tandem_kv_cache", default=None)


def current_cache() -> SlotCache | None:
    """Return the cache of the step that is under way in this thread."""
    return _CURRENT.get()


@contextmanager
def stepping(cache: SlotCache) -> Iterator[None]:
    """Make a cache the current one."""
    token, of_tokens = _CURRENT.set(cache), SEQUENCES.set(lambda: cache.slots)
    try:
        yield
    finally:
        _CURRENT.reset(token)
        SEQUENCES.reset(of_tokens)

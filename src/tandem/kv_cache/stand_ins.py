"""A model's cache object for a forward in sequence slots; its layers pass calls to a `SlotCache`.

Each layer stands for a layer of Transformers' own cache, whose contents the `SlotCache` keeps.
"""

from typing import Any

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
    keeps_prompt,
    layers_again,
    own_cache_class,
    selects_by_head,
)
from tandem.kv_cache.attention_call import NewCompressed
from tandem.kv_cache.base import NotInSlotsError, SlotCache
from tandem.kv_cache.chunks import chunked_layers
from tandem.kv_cache.index_keys import NewIndexKeys, Pool, Selection
from tandem.kv_cache.indexers import IndexScores
from tandem.kv_cache.states import StateHandle

# Transformers' cache layers by what they store.
_FULL_AND_STATES = cache_layer_kinds("LinearAttentionAndFullAttentionLayer")
_SLIDING_AND_STATES = cache_layer_kinds("LinearAttentionAndSlidingWindowAttentionLayer")
_SLIDING = (DynamicSlidingWindowLayer, *_SLIDING_AND_STATES)
_FULL = (DynamicLayer, DynamicIndexedLayer, *_FULL_AND_STATES)


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """Stands for a layer of Transformers' cache; passes its calls to a `SlotCache`."""

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
        """Return only the new keys and values; attention reads earlier keys and values itself."""
        self._cache.expect(self._layer)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return max(self._cache.lengths)

    def get_max_length(self) -> int:
        return -1


class _SelectingLayer(_Layer):
    """Stands for a layer that selects the positions that attention sees."""

    def select(
        self,
        selection: Selection,
        key: Tensor,
        query: Tensor,
        weights: Tensor | None,
        pool: Pool | None = None,
    ) -> Tensor:
        """Call `SlotCache.select` with tensors (b, n_tokens, ...); return a result of this form."""
        flat = None if weights is None else weights.flatten(0, 1)
        new = NewIndexKeys(self._layer, selection, pool)
        selected = self._cache.select(new, key.flatten(0, 1), query.flatten(0, 1), flat)
        return selected.view(*key.shape[:2], *selected.shape[1:])

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Raise `NotInSlotsError`: MiniMax-M3's indexer has an unknown number of heads."""
        raise NotInSlotsError("an indexer selects for other heads than those of keys")


class _IndexedLayer(_SelectingLayer):
    """Stands for a layer whose indexer's own code runs, with stand-ins for its keys."""

    def update_indexer(self, key_states: Tensor) -> IndexScores:
        """Return a stand-in for the index keys of each token's slot."""
        return IndexScores(self.select, key_states)

    @property
    def indexer_position_ids(self) -> None:
        """Always None: the positions of earlier tokens are not kept for the indexer."""

    @indexer_position_ids.setter
    def indexer_position_ids(self, position_ids: Tensor) -> None:
        """No-op."""


class _CompressedLayer(_SelectingLayer):
    """Stands for a layer with a window, and with compressed keys beside it."""

    def __init__(self, cache: SlotCache, layer: int) -> None:
        super().__init__(cache, layer)
        self.states = StateHandle(cache, layer, 0)

    def expect_compressed(self, ratio: int, key: Tensor, selected: Tensor | None) -> None:
        """Record compressed keys (b, n_tokens, dim) for the layer's next attention call.

        `ratio` and `selected` are as in `NewCompressed`.
        """
        self._cache.expect_compressed(NewCompressed(ratio, key.flatten(0, 1)[None], selected))


class _StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """Stands for a layer with states; returns handles in place of states."""

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
        """Return only the new inputs; the convolution reads earlier inputs from its state."""
        self._cache.requested_state = self._handles[state_idx]
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: object, state_idx: int = 0, **kwargs: object
    ) -> object:
        """Return the argument as it is, because the operation has written its state itself."""
        return recurrent_states


class _KeysAndStateLayer(_StateLayer, _Layer):
    """Stands for a layer that keeps both keys and values, and states."""

    def __init__(self, cache: SlotCache, layer: int, number_of_states: int) -> None:
        _Layer.__init__(self, cache, layer)
        _StateLayer.__init__(self, cache, layer, number_of_states)


def transformers_cache(model: PreTrainedModel, cache: SlotCache) -> DynamicCache:
    """Return the cache object for a forward; set `cache`'s windows and number of layers.

    The object has the class that the model's code expects. Raises `NotInSlotsError` if the model
    keeps no keys and values, or if a layer's cache has an unsupported class.
    """
    config = model.config.get_text_config(decoder=True)
    shell, chunked = DynamicCache(config=config), chunked_layers(config)
    shell.layers += layers_again(config, shell.layers)
    kinds = [type(layer) for layer in shell.layers]
    cache.windows_by_layer = {
        number: layer.sliding_window
        for number, layer in enumerate(shell.layers)
        if (type(layer) in _SLIDING or compresses_windows(layer)) and number not in chunked
    }
    cache.prompt_windows = {
        number: layer.sliding_window
        for number, layer in enumerate(shell.layers)
        if keeps_prompt(layer)
    }
    cache.has_compressed = any(map(compresses_windows, shell.layers))
    full = sum(
        kind in _FULL or selects_by_head(layer)
        for kind, layer in zip(kinds, shell.layers, strict=True)
    )
    full += len(cache.prompt_windows) + len(chunked)
    cache.num_layers = max(1, full + len(cache.windows_by_layer))
    if not kinds:
        raise NotInSlotsError("the model keeps no keys and values")
    shell.layers = [_stand_in(cache, number, layer) for number, layer in enumerate(shell.layers)]
    own = own_cache_class(model)
    if own is not None:
        layers, shell = shell.layers, own()
        shell.layers = layers
    return shell


def sees_all(model: PreTrainedModel) -> bool:
    """Tell whether a token sees all earlier positions, or all in its window or chunk.

    False if an indexer selects positions, or if a layer has compressed keys beside a window.
    """
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return not any(
        type(x) is DynamicIndexedLayer or compresses_windows(x) or selects_by_head(x)
        for x in layers
    )


def compresses(model: PreTrainedModel) -> bool:
    """Tell whether some layer has compressed keys beside a window."""
    config = model.config.get_text_config(decoder=True)
    return any(map(compresses_windows, DynamicCache(config=config).layers))


def _stand_in(cache: SlotCache, number: int, layer: Any) -> Any:
    kind = type(layer)
    if kind in (DynamicLayer, DynamicSlidingWindowLayer) or keeps_prompt(layer):
        return _Layer(cache, number)
    if kind is DynamicIndexedLayer:
        return _IndexedLayer(cache, number)
    if selects_by_head(layer):
        return _SelectingLayer(cache, number)
    if compresses_windows(layer):
        return _CompressedLayer(cache, number)
    if kind in (*_FULL_AND_STATES, *_SLIDING_AND_STATES):
        return _KeysAndStateLayer(cache, number, layer.number_of_states)
    if kind is LinearAttentionLayer:
        return _StateLayer(cache, number, layer.number_of_states)
    if is_empty_cache_layer(layer):
        return layer
    raise NotInSlotsError(f"a layer's cache is a {kind.__name__}")

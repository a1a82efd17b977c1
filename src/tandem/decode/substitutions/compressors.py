"""Compressed attention (DeepSeek-V4's) for any slots' tokens: one key for each window of tokens.

A compressor's own code gathers the windows of a batch of sequences of equal length, and returns all
keys so far. Here the key of a window belongs to the token that ends the window. The KV cache keeps
the key, and attention reads it beside the layer's sliding window. Where an indexer selects keys,
attention reads only the selected keys.
"""

from functools import partial

from torch import Tensor
from transformers import DynamicCache

from tandem.decode.substitutions.rotary import rotary_of
from tandem.decode.substitutions.substitution import Substitution, has
from tandem.foreign_types import ModelPart
from tandem.kernels.recurrent import Compression
from tandem.kv_cache.index_keys import Selection
from tandem.kv_cache.states import StateHandle

compresses = has(
    *("kv_proj", "gate_proj", "position_bias", "kv_norm", "rotary_emb", "rope_layer_type"),
    *("compress_rate", "head_dim"),
)


def compression_of(module: ModelPart) -> Compression:
    """Return the operation that a compressor or an indexer applies to its windows."""
    bias = module.position_bias
    return Compression(bias, bias.shape[1] // module.head_dim)


def _is_compressor(module: ModelPart) -> bool:
    return compresses(module) and not hasattr(module, "q_b_proj")


def _compress(
    compressor: ModelPart,
    hidden_states: Tensor,
    q_residual: Tensor,
    position_ids: Tensor,
    cache: DynamicCache,
    layer_idx: int,
) -> tuple[Tensor, None]:
    """Hand the step's compressed keys to attention through the KV cache.

    Returns a tensor without keys, and None for a mask, because the model's own code expects both.
    """
    layer = cache.layers[layer_idx]
    key = _keys(compressor, layer.states, "compressor", hidden_states, position_ids)
    selected = None
    indexer = getattr(compressor, "indexer", None)
    if indexer is not None:
        index_key = _keys(indexer, layer.states, "indexer", hidden_states, position_ids)
        query = indexer.q_b_proj(q_residual).view(*hidden_states.shape[:2], -1, indexer.head_dim)
        query = _rotated(indexer, query.transpose(1, 2), position_ids).transpose(1, 2)
        scorer = indexer.scorer
        weights = scorer.weights_proj(hidden_states).float() * scorer.weights_scaling
        selection = Selection.of_keys(
            scorer.softmax_scale, indexer.index_topk, indexer.compress_rate
        )
        selected = layer.select(selection, index_key, query, weights)
    layer.expect_compressed(compressor.compress_rate, key, selected)
    return hidden_states.new_empty(len(hidden_states), 1, 0, compressor.head_dim), None


def _keys(
    module: ModelPart, states: StateHandle, kind: str, hidden: Tensor, position_ids: Tensor
) -> Tensor:
    """Return the compressed key of each token's window, (b, n_tokens, dim).

    A token that ends no window gets zeros. A key is rotated by the position of its window's first
    token.
    """
    values, gates = module.kv_proj(hidden), module.gate_proj(hidden)
    operation = partial(compression_of, module)
    keys = states.advance(kind, operation, values.flatten(0, 1), gates.flatten(0, 1))
    normed = module.kv_norm(keys.view(*hidden.shape[:2], -1))
    firsts = position_ids.float() - (module.compress_rate - 1)
    return _rotated(module, normed[:, None], firsts)[:, 0]


def _rotated(module: ModelPart, heads: Tensor, position_ids: Tensor) -> Tensor:
    """Return `heads` (b, heads, n_tokens, dim) with rotary embeddings for the positions."""
    cos, sin = module.rotary_emb(
        heads, position_ids=position_ids, layer_type=module.rope_layer_type
    )
    turned: Tensor = rotary_of(module)(heads, cos, sin)
    return turned


COMPRESSOR = Substitution(_is_compressor, _compress)

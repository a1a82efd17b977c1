"""The attention function that replaces a model's own while Tandem runs a shallow copy of it.

Transformers finds it by the name "tandem" among its attention functions. It uses no mask: a token
attends to itself and to earlier tokens of its sequence, within the layer's window or chunk. With an
indexer, it attends only to the selected tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tandem.core.errors import ConfigError
from tandem.decode.substitutions.latents import attend_latents, has_latents
from tandem.foreign_types import ModelPart
from tandem.kernels.attention import AttentionForm, DistanceBias
from tandem.kv_cache.attention_call import AttentionCall
from tandem.kv_cache.base import NotInSlotsError, SlotCache, current_cache
from tandem.kv_cache.chunks import SeesOwnChunk
from tandem.kv_cache.indexers import SeesAllBefore, SelectedPositions

ATTENTION_IMPLEMENTATION = "tandem"


def attention_forward(
    module: ModelPart,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | SeesAllBefore | SeesOwnChunk | SelectedPositions | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | DistanceBias | None = None,
    indices: Tensor | None = None,
    sinks: Tensor | None = None,
    block_indices: SelectedPositions | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend with the KV cache of the step: (b, heads, n, dim) -> (b, n, heads, dim).

    The call has either b = 1 and the n tokens of all slots concatenated, or b slots with one token
    each. `key` and `value` contain only the step's tokens. `indices` (b, n, most) are the
    positions that an indexer selected for each token, as in `SlotCache.select`; `block_indices` are
    the blocks selected for each KV head. The states of a `DistanceBias` are (b, heads, n, dim).
    `sinks` (b, heads, n, 1) has a sink per token, `s_aux` (heads,) one for all tokens.
    """
    cache = _cache_of_step()
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal and vars(module).get("layer_idx") is None:  # it has no cache
        return _attend_to_given(query, key, value, scaling), None
    indices, block, chunk, has_mask = _visible(attention_mask, indices, block_indices)
    if has_mask or isinstance(position_bias, Tensor) or not causal:
        raise NotInSlotsError("attention has a mask or a bias of the model's own")
    cache.expect_sharing(module)
    compressed = cache.expected_compressed()
    if compressed is not None:
        indices = compressed.selected
    if query.shape[1] % key.shape[1]:
        raise NotInSlotsError(f"{query.shape[1]} query heads share {key.shape[1]} of keys")
    form = AttentionForm(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        key_dim=key.shape[-1],
        value_dim=value.shape[-1],
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=float(softcap or 0),
        window=sliding_window or cache.expected_window,  # some models pass it only to their mask
        keeps_prompt=cache.expects_prompt,
        chunk=chunk,
        selected_block=block,
        selects_by_head=indices is not None and indices.dim() == 4,
    )
    batch, _, num_tokens, _ = query.shape
    # (heads, all tokens, dim), always a view
    query, key, value = (x.transpose(0, 1).flatten(1, 2) for x in (query, key, value))
    selected = None if indices is None else indices.flatten(0, 1)
    bias = position_bias
    if bias is not None:
        bias = bias._replace(states=bias.states.transpose(0, 1).flatten(1, 2))
    all_sinks = s_aux if sinks is None else sinks.squeeze(-1).transpose(1, 2).flatten(0, 1)
    call = AttentionCall(form, query, key, value, all_sinks, selected, compressed, bias)
    is_latent = has_latents(module, cache)
    out = attend_latents(module, cache, call) if is_latent else cache.attend(call)
    return out.view(batch, num_tokens, *out.shape[1:]), None


def _cache_of_step() -> SlotCache:
    cache = current_cache()
    if cache is None:
        raise ConfigError(
            "attn_implementation='tandem' works only inside tandem.Generator; leave the model's "
            "attention as it was loaded"
        )
    return cache


class _Visible(NamedTuple):
    """What limits the earlier tokens to which a token may attend."""

    indices: Tensor | None
    """Positions or blocks that an indexer selected; None selects all."""
    block: int
    chunk: int
    """Positions of a chunk; 0: no chunks."""
    has_mask: bool
    """Whether the model passes its own mask."""


def _visible(
    mask: Tensor | SeesAllBefore | SeesOwnChunk | SelectedPositions | None,
    indices: Tensor | None,
    block_indices: SelectedPositions | None,
) -> _Visible:
    block, chunk = 1, 0
    if isinstance(mask, SelectedPositions):
        indices, mask = mask.indices, None
    if block_indices is not None:
        indices, block = block_indices
    if isinstance(mask, SeesOwnChunk):
        chunk, mask = mask.size, None
    has_mask = mask is not None and not isinstance(mask, SeesAllBefore)
    return _Visible(indices, block, chunk, has_mask)


def _attend_to_given(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attend to all given keys: (b, heads, n, dim) -> (b, n, heads, dim)."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2)


def register_attention() -> str:
    """Register the attention function with Transformers; return its name there."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_IMPLEMENTATION, attention_forward)
    return ATTENTION_IMPLEMENTATION

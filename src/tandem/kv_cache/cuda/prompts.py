"""Attention of a prompt's new tokens in torch; they are the last tokens of their slot."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.attention import DistanceBias
from tandem.kv_cache.attention_call import AttentionCall
from tandem.kv_cache.cuda.attention import (
    BiasOf,
    attention,
    attention_in_pieces,
    by_query_head,
    visible,
)


def attend_in_prompt(call: AttentionCall, keys: Tensor, values: Tensor) -> Tensor:
    """Return the result of attention for the call's tokens: (n_tokens, heads, value_dim).

    `keys` and `values` (KV heads, positions, dim) must be those of all the slot's positions. The
    call's tokens must be at the last positions.
    """
    form, query, _, _, sinks, selected, _, bias = call
    count, total = query.shape[1], keys.shape[1]
    group = form.num_heads // form.num_kv_heads
    keys = keys.repeat_interleave(group, 0)  # (heads, total, dim)
    values = values.repeat_interleave(group, 0)
    window, chunk = form.kept_window, form.chunk
    is_whole = count == total <= min(window or total, chunk or total)
    is_whole = is_whole and selected is None and bias is None
    if is_whole and not form.softcap and sinks is None:  # needs no mask, and has fast kernels
        out = F.scaled_dot_product_attention(
            query[None], keys[None], values[None], is_causal=True, scale=form.scale
        )
    else:
        selected = by_query_head(selected, group)
        mask = _seen_by_last(query, total, window, selected, chunk)
        heads = None if sinks is None else sinks.reshape(-1, form.num_heads, 1).transpose(0, 1)
        added = None if bias is None else _bias_of_last(bias, total)
        out = attention(form, query[None], keys[None], values[None], mask, heads, added)
    return out[0].transpose(0, 1).contiguous()  # as models' code looks at it


def attend_to_latents(call: AttentionCall, keys: Tensor, values: Tensor) -> Tensor:
    """Return the result of attention to latents, without a copy of the latents for each head.

    The arguments and the result are as in `attend_in_prompt`. If few tokens follow a long text,
    this is cheaper than expanding the latents.
    """
    form, query, _, _, sinks, selected, *_ = call
    mask = _seen_by_last(query, keys.shape[1], form.window, selected)[:, None]
    of_tokens = query.transpose(0, 1)[None]  # (1, n_tokens, heads, dim)
    heads = None if sinks is None else sinks.reshape(-1, 1)
    return attention_in_pieces(form, of_tokens, keys[None], values[None], mask, heads)[0]


def _seen_by_last(
    query: Tensor, total: int, window: int, selected: Tensor | None, chunk: int = 0
) -> Tensor:
    """Return a mask (n, total) of the positions that n queries see.

    The queries must be at the last n of the `total` positions. The mask is (heads, n, total) if the
    mask `selected` has heads.
    """
    place = torch.arange(total - query.shape[1], total, device=query.device)[:, None]
    seen = visible(place, torch.arange(total, device=query.device)[None], window, chunk)
    return seen if selected is None else seen & selected


def _bias_of_last(bias: DistanceBias, total: int) -> BiasOf:
    """Return the bias as a function of a range of queries, which are at the last positions."""
    positions = torch.arange(total, device=bias.states.device)
    own = positions[total - bias.states.shape[1] :, None]

    def of_tokens(some: slice) -> Tensor:
        part = bias._replace(states=bias.states[:, some])
        return part.at(own[some] - positions)[None]

    return of_tokens

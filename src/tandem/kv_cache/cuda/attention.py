"""Attention in torch over a GPU's keys and values, where none of Tandem's kernels applies."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.attention import AttentionForm

# Returns what is added to the scores of some queries: (b, h, n, m) fp32.
BiasOf = Callable[[slice], Tensor]

# Bounds the scores of attention that no fused kernel computes; several copies live at a time.
_MOST_SCORE_BYTES = 64 << 20


def visible(place: Tensor, position: Tensor, window: int, chunk: int = 0) -> Tensor:
    """Return a mask that tells whether a token at `place` sees `position`.

    A token sees itself and earlier tokens in its window and its chunk, whose sizes are `window` and
    `chunk`; 0: no limit. `place` and `position` are broadcast.
    """
    seen = position <= place
    if chunk:
        seen = seen & (position >= place // chunk * chunk)
    return seen & (position > place - window) if window else seen


def by_query_head(selected: Tensor | None, group: int) -> Tensor | None:
    """Turn a mask (n_tokens, KV heads, positions) into one (query heads, n_tokens, positions).

    A mask without heads, or None, is returned as it is.
    """
    if selected is None or selected.dim() == 2:
        return selected
    return selected.repeat_interleave(group, 1).transpose(0, 1)


def attention(
    form: AttentionForm,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    sinks: Tensor | None,
    bias: BiasOf | None = None,
) -> Tensor:
    """Return the attention of `q` (b, h, n, d) to `k` and `v` (b, h, m, d): (b, h, n, d).

    `sinks` (h, n or 1, 1) take a share of the softmax. `bias` returns what is added to the scores
    of a range of the queries.
    """
    if not form.softcap and sinks is None and bias is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=form.scale)
    return attention_in_pieces(form, q, k, v, mask, sinks, bias)


def attention_in_pieces(
    form: AttentionForm,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    sinks: Tensor | None,
    bias: BiasOf | None = None,
) -> Tensor:
    """Compute `attention` from its scores, for few queries at a time to limit their memory."""
    # fp32 scores of 2,048 queries of gpt-oss at 8,192 positions are 4 GB, and there are copies.
    bytes_per_query = 4 * q.shape[0] * q.shape[1] * k.shape[2]
    count = max(1, _MOST_SCORE_BYTES // bytes_per_query)
    pieces = []
    for first in range(0, q.shape[2], count):
        some = slice(first, first + count)
        sink = None if sinks is None else _of_queries(sinks, some)
        added = None if bias is None else bias(some)
        pieces.append(
            _attention_by_scores(form, q[:, :, some], k, v, _of_queries(mask, some), sink, added)
        )
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)


def _of_queries(tensor: Tensor, some: slice) -> Tensor:
    """Return the part of a tensor (..., n, m) for a range of the n queries; all of it if n = 1."""
    return tensor if tensor.shape[-2] == 1 else tensor[..., some, :]


def _attention_by_scores(
    form: AttentionForm,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    sinks: Tensor | None,
    added: Tensor | None,
) -> Tensor:
    """Compute `attention` with all scores in memory; `added`, if given, is the bias."""
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * form.scale
    if added is not None:
        scores = scores + added
    if form.softcap:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    scores = scores.masked_fill_(~mask, float("-inf"))
    if sinks is not None:
        nothing = sinks.float().expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, nothing], -1).softmax(-1)[..., :-1]
    else:
        scores = scores.softmax(-1)
    return torch.matmul(scores.to(v.dtype), v)

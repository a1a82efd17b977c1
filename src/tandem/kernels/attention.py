"""Attention over a KV cache on the CPU: natively for few queries, with torch for a prompt.

A cache holds the keys and values of one layer as (rows, heads, capacity, dim); each row has a
length of its own. Checks what C++ takes on trust.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels import _native
from tandem.kernels.dense import VALUE_DTYPES, CpuThreads


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """What a model's attention is beyond a softmax of scaled products."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0: they do not."""
    window: int = 0
    """Positions that a token sees, itself included; 0: all before it."""


class Segment(NamedTuple):
    """Tokens of one row that follow each other, among the tokens of a step."""

    row: int
    first_position: int
    num_tokens: int


class CachedAttention:
    """The attention of one layer, on its part of the KV cache."""

    def __init__(
        self, form: AttentionForm, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> None:
        """Take the cache's tensors (rows, kv heads, capacity, dim) and sinks (heads,), if any."""
        self.form = form
        self._sinks = None if sinks is None else sinks.detach().float().contiguous()
        self.native = _native.AttentionLayer(
            keys.dtype == torch.bfloat16,
            form.num_heads,
            form.num_kv_heads,
            form.key_dim,
            form.value_dim,
            form.scale,
            form.softcap,
            form.window,
            0 if self._sinks is None else self._sinks.data_ptr(),
        )
        self.use_cache(keys, values)

    def use_cache(self, keys: Tensor, values: Tensor) -> None:
        """Work on other tensors from now on, of the same shape but for rows and capacity."""
        assert keys.dtype == values.dtype
        assert keys.dtype in VALUE_DTYPES
        assert keys.is_contiguous()
        assert values.is_contiguous()
        assert keys.shape[1] == self.form.num_kv_heads
        assert (keys.shape[3], values.shape[3]) == (self.form.key_dim, self.form.value_dim)
        self._keys, self._values = keys, values
        self.native.set_cache(keys.data_ptr(), values.data_ptr(), keys.shape[2])

    def append(
        self, threads: CpuThreads, rows: Tensor, positions: Tensor, key: Tensor, value: Tensor
    ) -> None:
        """Write (kv heads, n_tokens, dim) of tokens whose row and position are (n_tokens,) int64.

        Rows and positions lie inside the cache: the caller has made room.
        """
        assert key.dtype == value.dtype
        assert key.dtype in VALUE_DTYPES
        key, value = _dense_last(key), _dense_last(value)
        threads.attention.append(
            self.native, key.dtype == torch.bfloat16, key.shape[1], rows.data_ptr(),
            positions.data_ptr(), key.data_ptr(), key.stride(1), key.stride(0), value.data_ptr(),
            value.stride(1), value.stride(0),
        )  # fmt: skip

    def attend(self, threads: CpuThreads, rows: Tensor, positions: Tensor, query: Tensor) -> Tensor:
        """Attend natively: query (heads, n_tokens, key dim) -> (n_tokens, heads, value dim).

        Costs what the filled length costs, for each token anew: for a step, not for a prompt.
        """
        query = _dense_last(query)
        num_tokens = query.shape[1]
        shape = (num_tokens, self.form.num_heads, self.form.value_dim)
        out = torch.empty(shape, dtype=query.dtype)
        threads.attention.attend(
            self.native, query.dtype == torch.bfloat16, num_tokens, rows.data_ptr(),
            positions.data_ptr(), query.data_ptr(), query.stride(1), query.stride(0),
            out.data_ptr(),
        )  # fmt: skip
        return out

    def attend_segment(self, segment: Segment, query: Tensor) -> Tensor:
        """Attend with torch for a prompt's tokens: (heads, n, key dim) -> (n, heads, value dim)."""
        end = segment.first_position + segment.num_tokens
        first = max(0, segment.first_position + 1 - self.form.window) if self.form.window else 0
        keys = self._keys[segment.row, :, first:end].to(query.dtype)
        values = self._values[segment.row, :, first:end].to(query.dtype)
        mask = None
        if first < segment.first_position or 0 < self.form.window < segment.num_tokens:
            mask = _mask(segment.first_position - first, segment.num_tokens, self.form.window)
        if self.form.softcap or self._sinks is not None:
            if mask is None:
                mask = _mask(0, segment.num_tokens, 0)
            return _attend_plainly(self.form, query, keys, values, mask, self._sinks)
        out = F.scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=mask, is_causal=mask is None,
            scale=self.form.scale, enable_gqa=self.form.num_heads != self.form.num_kv_heads,
        )  # fmt: skip
        return out[0].transpose(0, 1)


def _mask(num_before: int, num_tokens: int, window: int) -> Tensor:
    """Mark what each of the last `num_tokens` positions sees: (num_tokens, all) bool."""
    distance = torch.arange(num_before, num_before + num_tokens)[:, None] - torch.arange(
        num_before + num_tokens
    )
    seen = distance >= 0
    return seen & (distance < window) if window else seen


def _attend_plainly(
    form: AttentionForm,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    sinks: Tensor | None,
) -> Tensor:
    """Do what torch's fused attention has no option for, one KV head after the other."""
    heads = form.num_heads // form.num_kv_heads
    outs = []
    for kv_head in range(form.num_kv_heads):
        mine = slice(kv_head * heads, (kv_head + 1) * heads)
        scores = (query[mine].float() * form.scale) @ keys[kv_head].float().T  # (heads, n, all)
        if form.softcap:
            scores = form.softcap * torch.tanh(scores / form.softcap)
        scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            sink = sinks[mine, None, None].expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        outs.append((weights @ values[kv_head].float()).to(query.dtype))
    return torch.cat(outs).transpose(0, 1)


def _dense_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()

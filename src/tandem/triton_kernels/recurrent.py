"""Layers that carry a state from token to token: short convolutions and linear recurrences.

The tokens of a call are those of neighbouring slots, as many of each, slot by slot. `positions`
(slots,) int64 say where each slot's first token stands: at 0 a slot begins with zeros, below that
it is idle and its state stays as it is. A prompt is a scan: a program keeps its part of a state in
registers from token to token, so that what comes out does not depend on where a prompt is cut.
"""

import triton
import triton.language as tl
from triton.language import constexpr, tensor

_LEAST_SQUARE = constexpr(1e-6)
_SLOTS = ("first_slot", "num_tokens")


@triton.jit
def _input(
    x: tensor,
    state: tensor,
    at: tensor,
    token_stride: tensor,
    position: tensor,
    mask: tensor,
    channels: constexpr,
    width: constexpr,
) -> tensor:
    """Return the inputs of some channels at a token, fp32; those before the first are kept."""
    given = tl.load(x + at * token_stride, mask=mask & (at >= 0), other=0.0).to(tl.float32)
    is_kept = mask & (at < 0) & (position > 0)
    return given + tl.load(state + (at + width - 1) * channels, mask=is_kept, other=0.0)


@triton.jit(do_not_specialize=(*_SLOTS, "num_convolved", "token_stride", "keeps"))
def convolve_tokens(
    x: tensor,
    weight: tensor,
    bias: tensor,
    states: tensor,
    positions: tensor,
    out: tensor,
    first_slot: tensor,
    num_tokens: tensor,
    num_convolved: tensor,
    token_stride: tensor,
    keeps: tensor,
    channels: constexpr,
    width: constexpr,
    has_bias: constexpr,
    has_silu: constexpr,
    block_channels: constexpr,
    block_tokens: constexpr,
) -> None:
    """Write the convolution of each slot's first `num_convolved` tokens; then, if it `keeps`, its
    last inputs: what all blocks of its tokens have read by then.

    `out` is (slots * tokens, channels), `weight` (width, channels), `states` (slots, width - 1,
    channels). A program is (block of channels, block of tokens, slot).
    """
    channel = tl.program_id(0) * block_channels + tl.arange(0, block_channels)
    row = tl.program_id(2).to(tl.int64)
    mask, position = channel < channels, tl.load(positions + row)
    state = states + (first_slot + row) * (width - 1) * channels + channel
    x += row * num_tokens * token_stride + channel
    out += row * num_tokens * channels + channel
    dtype: constexpr = out.dtype.element_ty
    first = tl.program_id(1) * block_tokens
    for t in range(first, min(first + block_tokens, num_convolved)):
        total = tl.full((block_channels,), 0.0, dtype=tl.float32)
        if has_bias:
            total += tl.load(bias + channel, mask=mask, other=0.0)
        for j in tl.static_range(width):
            given = _input(
                x, state, t + (j + 1 - width), token_stride, position, mask, channels, width
            )
            total += given * tl.load(weight + j * channels + channel, mask=mask, other=0.0)
        if has_silu:
            total = total.to(dtype).to(tl.float32)
            total = total / (1.0 + tl.exp(-total))
        tl.store(out + t * channels, total.to(dtype), mask=mask)
    if keeps != 0:
        for i in tl.static_range(width - 1):
            at = num_tokens + (i + 1 - width)
            new = _input(x, state, at, token_stride, position, mask, channels, width)
            tl.debug_barrier()  # an input is read from a later row than it is written to
            tl.store(state + i * channels, new, mask=mask & (position >= 0))


@triton.jit
def _key(
    source: tensor, at: tensor, mask: tensor, is_normalised: constexpr, scale: constexpr
) -> tensor:
    """Return a query or key in fp32, over its length if that is asked for, times `scale`."""
    x = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    if is_normalised:
        x = x / tl.sqrt(tl.reduce(x * x, 0, tl.standard._sum_combine) + _LEAST_SQUARE)
    return x * scale


@triton.jit(
    do_not_specialize=(
        *_SLOTS, "value_stride", "value_head", "query_stride", "query_head", "key_stride",
        "key_head",
    )
)  # fmt: skip
def recur_tokens(
    value: tensor,
    query: tensor,
    key: tensor,
    decay: tensor,
    rate: tensor,
    factor: tensor,
    skip: tensor,
    states: tensor,
    positions: tensor,
    out: tensor,
    first_slot: tensor,
    num_tokens: tensor,
    value_stride: tensor,
    value_head: tensor,
    query_stride: tensor,
    query_head: tensor,
    key_stride: tensor,
    key_head: tensor,
    num_heads: constexpr,
    num_key_heads: constexpr,
    key_dim: constexpr,
    value_dim: constexpr,
    decay_kind: constexpr,
    is_delta: constexpr,
    is_normalised: constexpr,
    scale: constexpr,
    has_rate: constexpr,
    has_skip: constexpr,
    key_width: constexpr,
    block_values: constexpr,
) -> None:
    """Write S = e^decay S; S += key (x) rate (value - key S); out = query S + skip value.

    As of `tandem.kernels.recurrent.Recurrence`; out is (slots * tokens, heads, value_dim),
    `states` (slots, heads, key_dim, value_dim), `factor` (key_dim, value_dim). A program is (block
    of values, head, slot).
    """
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    k, v = tl.arange(0, key_width), tl.program_id(0) * block_values + tl.arange(0, block_values)
    is_key, is_value = k < key_dim, v < value_dim
    mask = is_key[:, None] & is_value[None, :]
    position = tl.load(positions + row)
    place = k[:, None] * value_dim + v[None, :]
    kept = states + ((first_slot + row) * num_heads + head) * key_dim * value_dim + place
    state = tl.load(kept, mask=mask & (position > 0), other=0.0)
    first = row * num_tokens
    of_keys = head // (num_heads // num_key_heads)
    value += first * value_stride + head * value_head
    query += first * query_stride + of_keys * query_head
    key += first * key_stride + of_keys * key_head
    line = first * num_heads + head
    if decay_kind == "pair":
        factors = tl.load(factor + place, mask=mask, other=0.0)
    if has_skip:
        skipped = tl.load(skip + head * value_dim + v, mask=is_value, other=0.0)
    for _ in range(num_tokens):
        q = _key(query, k, is_key, is_normalised, scale)
        said = _key(key, k, is_key, is_normalised, 1.0)
        given = tl.load(value + v, mask=is_value, other=0.0).to(tl.float32)
        if decay_kind == "head":
            state *= tl.exp(tl.load(decay + line))
        elif decay_kind == "key":
            state *= tl.exp(tl.load(decay + line * key_dim + k, mask=is_key, other=0.0))[:, None]
        else:
            fading = tl.load(decay + line * value_dim + v, mask=is_value, other=0.0)
            state *= tl.exp(fading[None, :] * factors)
        change = given
        if is_delta:
            change = change - tl.reduce(state * said[:, None], 0, tl.standard._sum_combine)
        if has_rate:
            change = change * tl.load(rate + line).to(tl.float32)
        state += said[:, None] * change[None, :]
        found = tl.reduce(state * q[:, None], 0, tl.standard._sum_combine)
        if has_skip:
            found += skipped * given
        tl.store(out + line * value_dim + v, found.to(out.dtype.element_ty), mask=is_value)
        value, query, key = value + value_stride, query + query_stride, key + key_stride
        line += num_heads
    tl.store(kept, state, mask=mask & (position >= 0))

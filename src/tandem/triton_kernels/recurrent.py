"""Layers that carry a state from token to token: short convolutions and linear recurrences.

The tokens of a call come in runs, each of one slot, described by `runs` as in `device_states.Run`.
A run first repeats logged tokens. The slot's state is stored after the run's certain tokens; its
other tokens may be rejected later, so they are logged. A prompt is a scan: a program keeps its part
of a state in registers from token to token, so that results do not depend on where a prompt is cut.
"""

import triton
import triton.language as tl
from triton.language import constexpr, tensor

_LEAST_SQUARE = constexpr(1e-6)
_RUN_FIELDS = constexpr(6)


@triton.jit
def _run(runs: tensor, number: tensor) -> tensor:
    """Return the fields of run `number`, in the order of `device_states.Run`.

    The fields are the slot, the first token, the numbers of tokens, of certain tokens and of tokens
    to repeat, and the half of the log.
    """
    run = runs + number * _RUN_FIELDS
    return (
        tl.load(run), tl.load(run + 1), tl.load(run + 2), tl.load(run + 3), tl.load(run + 4),
        tl.load(run + 5),
    )  # fmt: skip


@triton.jit
def _input(
    x: tensor,
    state: tensor,
    logged: tensor,
    at: tensor,
    token_stride: tensor,
    num_again: tensor,
    mask: tensor,
    channels: constexpr,
    width: constexpr,
) -> tensor:
    """Return some channels' inputs at token `at` of a run, fp32; if negative, from log or state."""
    value_vector = tl.load(x + at * token_stride, mask=mask & (at >= 0), other=0.0).to(tl.float32)
    before = at + num_again
    is_logged, is_kept = (at < 0) & (before >= 0), (num_again >= 0) & (before < 0)
    value_vector += tl.load(logged + before * channels, mask=mask & is_logged, other=0.0)
    is_kept = mask & is_kept & (at < 0)
    return value_vector + tl.load(state + (before + width - 1) * channels, mask=is_kept, other=0.0)


@triton.jit(do_not_specialize=("computes", "keeps", "token_stride"))
def convolve_tokens(
    x: tensor,
    weight: tensor,
    bias: tensor,
    states: tensor,
    log: tensor,
    runs: tensor,
    out: tensor,
    computes: tensor,
    keeps: tensor,
    token_stride: tensor,
    channels: constexpr,
    width: constexpr,
    has_bias: constexpr,
    has_silu: constexpr,
    most_drafted: constexpr,
    block_channels: constexpr,
    block_tokens: constexpr,
) -> None:
    """Write the convolution of each run's tokens if `computes`; then store states if `keeps`.

    States hold the last inputs of certain tokens (those that cannot be rejected); later inputs are
    logged. A launch with `keeps` overwrites the states, so it must either have a single block of
    tokens, or come after a separate launch with `computes` over all blocks.

    `out` is (n_tokens, channels), `weight` (width, channels), `states` (slots, width - 1,
    channels), `log` (slots, 2, most_drafted, channels). A program is (block of channels, block of
    tokens, run).
    """
    channel = tl.program_id(0) * block_channels + tl.arange(0, block_channels)
    mask = channel < channels
    slot, row, num_tokens, num_certain, num_again, half = _run(runs, tl.program_id(2))
    state = states + slot * (width - 1) * channels + channel
    logged = log + (2 * slot + half) * most_drafted * channels + channel
    x += row * token_stride + channel
    out += row * channels + channel
    dtype: constexpr = out.dtype.element_ty
    first = tl.program_id(1) * block_tokens
    for t in range(first, tl.minimum(first + block_tokens, num_tokens * computes)):
        total = tl.full((block_channels,), 0.0, dtype=tl.float32)
        if has_bias:
            total += tl.load(bias + channel, mask=mask, other=0.0)
        for j in tl.static_range(width):
            value_vector = _input(
                x, state, logged, t + (j + 1 - width), token_stride, num_again, mask, channels,
                width,
            )  # fmt: skip
            total += value_vector * tl.load(weight + j * channels + channel, mask=mask, other=0.0)
        if has_silu:
            total = total.to(dtype).to(tl.float32)
            total = total / (1.0 + tl.exp(-total))
        tl.store(out + t * channels, total.to(dtype), mask=mask)
    if (keeps != 0) & (num_certain > 0):
        for i in tl.static_range(width - 1):
            at = num_certain + (i + 1 - width)
            new = _input(x, state, logged, at, token_stride, num_again, mask, channels, width)
            tl.debug_barrier()  # inputs are read from later rows than those they are written to
            tl.store(state + i * channels, new, mask=mask)
        logged += (1 - 2 * half) * most_drafted * channels
        for t in range(num_certain, num_tokens):
            value_vector = tl.load(x + t * token_stride, mask=mask, other=0.0).to(tl.float32)
            tl.store(logged + (t - num_certain) * channels, value_vector, mask=mask)


@triton.jit
def _key(
    source: tensor, at: tensor, mask: tensor, is_normalised: constexpr, scale: constexpr
) -> tensor:
    """Return a query or key in fp32, normalised if requested, times `scale`."""
    x = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    if is_normalised:
        x = x / tl.sqrt(tl.reduce(x * x, 0, tl.standard._sum_combine) + _LEAST_SQUARE)
    return x * scale


@triton.jit
def _moved_on(
    state: tensor,
    key_vector: tensor,
    value_vector: tensor,
    decay: tensor,
    rate: tensor,
    k: tensor,
    v: tensor,
    is_key: tensor,
    is_value: tensor,
    factors: tensor,
    decay_kind: constexpr,
    is_delta: constexpr,
    has_rate: constexpr,
) -> tensor:
    """Return a part of a head's state after one more token, whose key and value are given."""
    if decay_kind == "head":
        state = state * tl.exp(tl.load(decay))
    elif decay_kind == "key":
        state = state * tl.exp(tl.load(decay + k, mask=is_key, other=0.0))[:, None]
    else:
        state = state * tl.exp(tl.load(decay + v, mask=is_value, other=0.0)[None, :] * factors)
    change = value_vector
    if is_delta:
        change = change - tl.reduce(state * key_vector[:, None], 0, tl.standard._sum_combine)
    if has_rate:
        change = change * tl.load(rate).to(tl.float32)
    return state + key_vector[:, None] * change[None, :]


@triton.jit
def _log_token(
    to: tensor,
    key: tensor,
    value_vector: tensor,
    decay: tensor,
    rate: tensor,
    k: tensor,
    v: tensor,
    is_key: tensor,
    is_value: tensor,
    head: tensor,
    num_heads: constexpr,
    num_logged_keys: constexpr,
    key_dim: constexpr,
    value_dim: constexpr,
    num_decays: constexpr,
    decay_kind: constexpr,
    has_rate: constexpr,
) -> None:
    """Log a program's part of a token: keys, values, decays and rates, one after another.

    Numbers that several programs have read are written only by the first of these programs.
    """
    group: constexpr = num_heads // num_logged_keys
    is_first = tl.program_id(0) == 0
    numbers = tl.load(key + k, mask=is_key, other=0.0).to(tl.float32)
    owns_key = is_first & (head % group == 0)
    tl.store(to + head // group * key_dim + k, numbers, mask=is_key & owns_key)
    to += num_logged_keys * key_dim
    tl.store(to + head * value_dim + v, value_vector, mask=is_value)
    to += num_heads * value_dim
    if decay_kind == "head":
        tl.store(to + head, tl.load(decay), mask=is_first)
    elif decay_kind == "key":
        fading = tl.load(decay + k, mask=is_key, other=0.0)
        tl.store(to + head * key_dim + k, fading, mask=is_key & is_first)
    else:
        fading = tl.load(decay + v, mask=is_value, other=0.0)
        tl.store(to + head * value_dim + v, fading, mask=is_value)
    if has_rate:
        to += num_heads * num_decays
        tl.store(to + head, tl.load(rate).to(tl.float32), mask=is_first)


@triton.jit
def _done_again(
    state: tensor, at: tensor, num_again: tensor, k: tensor, v: tensor, is_key: tensor,
    is_value: tensor, factors: tensor, num_heads: constexpr, num_logged_keys: constexpr,
    key_dim: constexpr, value_dim: constexpr, num_decays: constexpr, num_logged: constexpr,
    decay_kind: constexpr, is_delta: constexpr, is_normalised: constexpr, has_rate: constexpr,
) -> tensor:  # fmt: skip
    """Return a part of a head's state after repeating `num_again` tokens of the log at `at`."""
    head = tl.program_id(1)
    values_at: constexpr = num_logged_keys * key_dim
    decays_at: constexpr = values_at + num_heads * value_dim
    rates_at: constexpr = decays_at + num_heads * num_decays
    logged = head // (num_heads // num_logged_keys) * key_dim
    for _ in range(num_again):
        key_vector = _key(at + logged, k, is_key, is_normalised, 1.0)
        value_vector = tl.load(at + values_at + head * value_dim + v, mask=is_value, other=0.0)
        state = _moved_on(
            state, key_vector, value_vector, at + decays_at + head * num_decays,
            at + rates_at + head, k, v, is_key, is_value, factors, decay_kind, is_delta, has_rate,
        )  # fmt: skip
        at += num_logged
    return state


@triton.jit(
    do_not_specialize=(
        "value_stride", "value_head", "query_stride", "query_head", "key_stride", "key_head",
    )
)  # fmt: skip
def recur_tokens(
    value: tensor, query: tensor, key: tensor, decay: tensor, rate: tensor, factor: tensor,
    skip: tensor, states: tensor, log: tensor, runs: tensor, out: tensor, value_stride: tensor,
    value_head: tensor, query_stride: tensor, query_head: tensor, key_stride: tensor,
    key_head: tensor, num_heads: constexpr, num_key_heads: constexpr, num_logged_keys: constexpr,
    key_dim: constexpr, value_dim: constexpr, num_decays: constexpr, num_logged: constexpr,
    most_drafted: constexpr, decay_kind: constexpr, is_delta: constexpr, is_normalised: constexpr,
    scale: constexpr, has_rate: constexpr, has_skip: constexpr, key_width: constexpr,
    block_values: constexpr,
) -> None:  # fmt: skip
    """Compute S = e^decay S; S += key (x) rate * (value - key S); out = query S + skip value.

    See `tandem.kernels.recurrent.Recurrence`. out is (n_tokens, heads, value_dim), `states` (slots,
    heads, key_dim, value_dim), `factor` (key_dim, value_dim), `log` (slots, 2, most_drafted,
    num_logged) with the keys of `num_logged_keys` heads. A program is (values, head, run).
    """
    head, of_keys = tl.program_id(1), tl.program_id(1) // (num_heads // num_key_heads)
    k, v = tl.arange(0, key_width), tl.program_id(0) * block_values + tl.arange(0, block_values)
    is_key, is_value = k < key_dim, v < value_dim
    mask = is_key[:, None] & is_value[None, :]
    slot, row, num_tokens, num_certain, num_again, half = _run(runs, tl.program_id(2))
    place = k[:, None] * value_dim + v[None, :]
    kept = states + (slot * num_heads + head) * key_dim * value_dim + place
    state = tl.load(kept, mask=mask & (num_again >= 0), other=0.0)
    factors = 0.0
    if decay_kind == "pair":
        factors = tl.load(factor + place, mask=mask, other=0.0)
    state = _done_again(
        state, log + (2 * slot + half) * most_drafted * num_logged, num_again, k, v, is_key,
        is_value, factors, num_heads, num_logged_keys, key_dim, value_dim, num_decays, num_logged,
        decay_kind, is_delta, is_normalised, has_rate,
    )  # fmt: skip
    value += row * value_stride + head * value_head
    query += row * query_stride + of_keys * query_head
    key += row * key_stride + of_keys * key_head
    line = row * num_heads + head
    if has_skip:
        skipped = tl.load(skip + head * value_dim + v, mask=is_value, other=0.0)
    for t in range(num_tokens):
        q = _key(query, k, is_key, is_normalised, scale)
        key_vector = _key(key, k, is_key, is_normalised, 1.0)
        value_vector = tl.load(value + v, mask=is_value, other=0.0).to(tl.float32)
        state = _moved_on(
            state, key_vector, value_vector, decay + line * num_decays, rate + line, k, v, is_key,
            is_value, factors, decay_kind, is_delta, has_rate,
        )  # fmt: skip
        found = tl.reduce(state * q[:, None], 0, tl.standard._sum_combine)
        if has_skip:
            found += skipped * value_vector
        tl.store(out + line * value_dim + v, found.to(out.dtype.element_ty), mask=is_value)
        if t + 1 == num_certain:
            tl.store(kept, state, mask=mask)
        if (t >= num_certain) & (num_certain > 0):
            _log_token(
                log + ((2 * slot + 1 - half) * most_drafted + t - num_certain) * num_logged, key,
                value_vector, decay + line * num_decays, rate + line, k, v, is_key, is_value, head,
                num_heads, num_logged_keys, key_dim, value_dim, num_decays, decay_kind, has_rate,
            )  # fmt: skip
        value, query, key = value + value_stride, query + query_stride, key + key_stride
        line += num_heads

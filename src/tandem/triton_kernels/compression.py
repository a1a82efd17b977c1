"""Compressed keys on a GPU: stores a step's tokens, and computes keys where windows end.

See `tandem.kernels.device_compression`. A window's tokens that belong to the present step are read
from the step's inputs, because other programs write them to the ring at the same time.
"""

import triton
import triton.language as tl
from triton.language import constexpr, tensor


@triton.jit
def _keep(
    values: tensor, gates: tensor, bias: tensor, ring: tensor, position: tensor, col: tensor,
    is_dim: tensor, ratio: constexpr, num_series: constexpr, kept: constexpr, dim: constexpr,
) -> None:  # fmt: skip
    """Write some columns of a token's values, and of its gates plus bias, to its slot's ring."""
    width: constexpr = num_series * dim
    for series in tl.static_range(num_series):
        at = series * dim + col
        value = tl.load(values + at, mask=is_dim, other=0.0).to(tl.float32)
        gate = tl.load(gates + at, mask=is_dim, other=0.0).to(tl.float32)
        gate += tl.load(bias + position % ratio * width + at, mask=is_dim, other=0.0)
        place = ring + position % kept * 2 * width + at
        tl.store(place, value, mask=is_dim)
        tl.store(place + width, gate, mask=is_dim)


@triton.jit
def _window_key(
    values: tensor, gates: tensor, bias: tensor, ring: tensor, slots: tensor, positions: tensor,
    token: tensor, value_stride: tensor, gate_stride: tensor, col: tensor, is_dim: tensor,
    ratio: constexpr, num_series: constexpr, kept: constexpr, dim: constexpr,
    block_tokens: constexpr,
) -> tensor:  # fmt: skip
    """Return some columns of the compressed key of the window that `token` ends.

    The key is the sum of the window's values, weighted by the softmax of their gates plus bias.
    With two series, the previous window's tokens use the first series, and this window's tokens the
    second.
    """
    span: constexpr = num_series * ratio
    width: constexpr = num_series * dim
    number = tl.arange(0, block_tokens)
    at = tl.load(positions + token) + 1 - span + number
    row = token + 1 - span + number
    is_there = (number < span) & (at >= 0)
    is_row = is_there & (row >= 0)
    is_new = is_row & (tl.load(slots + row, mask=is_row, other=-1) == tl.load(slots + token))
    is_new = is_new & (tl.load(positions + row, mask=is_row, other=-1) == at)
    of_series = (number // ratio * dim)[:, None] + col[None, :]
    new = is_new[:, None] & is_dim[None, :]
    old = (is_there & ~is_new)[:, None] & is_dim[None, :]
    place = ring + (at % kept * 2 * width)[:, None] + of_series
    gate = tl.load(gates + row[:, None] * gate_stride + of_series, mask=new, other=0.0)
    of_bias = tl.load(bias + (at % ratio * width)[:, None] + of_series, mask=new, other=0.0)
    gate = gate.to(tl.float32) + of_bias + tl.load(place + width, mask=old, other=0.0)
    gate = tl.where(is_there[:, None], gate, float("-inf"))
    weight = tl.exp(gate - tl.reduce(gate, 0, tl.standard._elementwise_max)[None, :])
    value = tl.load(values + row[:, None] * value_stride + of_series, mask=new, other=0.0)
    value = value.to(tl.float32) + tl.load(place, mask=old, other=0.0)
    total = tl.reduce(weight, 0, tl.standard._sum_combine)
    return tl.reduce(weight * value, 0, tl.standard._sum_combine) / total


@triton.jit(do_not_specialize=("value_stride", "gate_stride"))
def compress_tokens(
    values: tensor, gates: tensor, bias: tensor, rings: tensor, slots: tensor, positions: tensor,
    out: tensor, value_stride: tensor, gate_stride: tensor, ratio: constexpr,
    num_series: constexpr, kept: constexpr, dim: constexpr, block_tokens: constexpr,
    block_dim: constexpr,
) -> None:  # fmt: skip
    """Write compressed keys: out (n_tokens, dim), zeros where a token ends no window.

    Also stores the tokens in their slots' rings. A program is (columns, token). `values` and
    `gates` are (n_tokens, series * dim), `bias` (ratio, series * dim), `rings` (slots, kept, 2,
    series * dim). `kept` must be so large that a step's tokens do not overwrite entries that
    another token's window reads.
    """
    token = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * block_dim + tl.arange(0, block_dim)
    is_dim = col < dim
    position = tl.load(positions + token)
    ring = rings + tl.load(slots + token) * kept * 2 * num_series * dim
    _keep(
        values + token * value_stride, gates + token * gate_stride, bias, ring, position, col,
        is_dim, ratio, num_series, kept, dim,
    )  # fmt: skip
    key = tl.full((block_dim,), 0.0, dtype=tl.float32)
    if (position + 1) % ratio == 0:
        key = _window_key(
            values, gates, bias, ring, slots, positions, token, value_stride, gate_stride, col,
            is_dim, ratio, num_series, kept, dim, block_tokens,
        )  # fmt: skip
    tl.store(out + token * dim + col, key.to(out.dtype.element_ty), mask=is_dim)

"""Hyper-connections of a decode step: residual streams to a layer's input, its output to streams.

    multiply_streams   each program: products of a part of a token's values with a matrix's rows
    weigh_streams      adds up the parts, makes weights of them, and writes the layer's input
    add_streams        writes the streams after the layer

`csrc/hyper_connections.hpp` has the equations.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from tandem.kernels.hyper_connections import HyperConnection

_BLOCK_VALUES = 256
_BLOCK_COLS = 256
_WARPS = 4
_LOWEST = constexpr(-1e30)  # stands for missing rows; finite, because -inf minus -inf is NaN


@triton.jit
def multiply_streams(
    streams: tensor, matrix: tensor, sums: tensor, num_values: constexpr, num_rows: constexpr,
    num_parts: constexpr, block_rows: constexpr, block_values: constexpr,
) -> None:  # fmt: skip
    """Write sums (tokens, parts, rows + 1): a product with each row, then the sum of squares.

    A program is (part, token).
    """
    token = tl.program_id(1).to(tl.int64)
    row, value = tl.arange(0, block_rows), tl.arange(0, block_values)
    value += tl.program_id(0) * block_values
    is_row, is_value = row < num_rows, value < num_values
    x = tl.load(streams + token * num_values + value, mask=is_value, other=0.0).to(tl.float32)
    at = matrix + row[:, None] * num_values + value[None, :]
    factors = tl.load(at, mask=is_row[:, None] & is_value[None, :], other=0.0).to(tl.float32)
    sums += (token * num_parts + tl.program_id(0)) * (num_rows + 1)
    products = tl.reduce(factors * x[None, :], 1, tl.standard._sum_combine)
    tl.store(sums + row, products, mask=is_row)
    tl.store(sums + num_rows, tl.reduce(x * x, 0, tl.standard._sum_combine))


@triton.jit
def _rows(
    sums: tensor, base: tensor, scale: tensor, row: tensor, is_row: tensor, num_rows: constexpr,
    num_parts: constexpr, block_parts: constexpr,
) -> tensor:  # fmt: skip
    """Return some rows' products (the sums of all parts) times scale, plus their base."""
    part = tl.arange(0, block_parts)
    mask = (part < num_parts)[:, None] & is_row[None, :]
    parts = tl.load(sums + part[:, None] * (num_rows + 1) + row[None, :], mask=mask, other=0.0)
    of_base = tl.load(base + row, mask=is_row, other=0.0)
    return tl.reduce(parts, 0, tl.standard._sum_combine) * scale + of_base


@triton.jit
def _mixture(
    rows: tensor, is_there: tensor, num_rounds: constexpr, eps: constexpr, size: constexpr
) -> tensor:
    """Return a doubly stochastic matrix (size, size) from logits in concatenated rows.

    Rows and columns are normalised `num_rounds` times. Where `is_there` is false, the result has
    the numbers of the identity.
    """
    rows, is_there = tl.reshape(rows, (size, size)), tl.reshape(is_there, (size, size))
    rest = tl.where(tl.arange(0, size)[:, None] == tl.arange(0, size)[None, :], 1.0, 0.0)
    largest = tl.reduce(tl.where(is_there, rows, _LOWEST), 1, tl.standard._elementwise_max)
    found = tl.where(is_there, tl.exp(tl.where(is_there, rows - largest[:, None], 0.0)), rest)
    found = found / tl.reduce(found, 1, tl.standard._sum_combine)[:, None] + eps
    found = tl.where(is_there, found, rest)
    found = found / (tl.reduce(found, 0, tl.standard._sum_combine)[None, :] + eps)
    for _ in range(num_rounds - 1):
        found = found / (tl.reduce(found, 1, tl.standard._sum_combine)[:, None] + eps)
        found = found / (tl.reduce(found, 0, tl.standard._sum_combine)[None, :] + eps)
    return found


@triton.jit
def weigh_streams(
    streams: tensor, sums: tensor, base: tensor, scales: tensor, out: tensor, weights: tensor,
    num_streams: constexpr, dim: constexpr, num_rows: constexpr, num_parts: constexpr,
    num_rounds: constexpr, norm_eps: constexpr, eps: constexpr, output_factor: constexpr,
    output_eps: constexpr, block_parts: constexpr, block_streams: constexpr,
    block_cols: constexpr,
) -> None:  # fmt: skip
    """Write the layer's input: out (tokens, dim), a weighted sum of the token's streams.

    Also writes weights (tokens, rows - streams) for `add_streams`. A program is (columns, token).
    """
    token = tl.program_id(1).to(tl.int64)
    sums += token * num_parts * (num_rows + 1)
    part = tl.arange(0, block_parts)
    squares = tl.load(sums + part * (num_rows + 1) + num_rows, mask=part < num_parts, other=0.0)
    mean = tl.reduce(squares, 0, tl.standard._sum_combine) / (num_streams * dim)
    factor = 1.0 / tl.sqrt(mean + norm_eps)
    stream = tl.arange(0, block_streams)
    is_stream = stream < num_streams
    own = _rows(
        sums, base, tl.load(scales) * factor, stream, is_stream, num_rows, num_parts, block_parts
    )
    own = tl.where(is_stream, 1.0 / (1.0 + tl.exp(-own)) + eps, 0.0)
    col = tl.program_id(0) * block_cols + tl.arange(0, block_cols)
    at = streams + (token * num_streams + stream[:, None]) * dim + col[None, :]
    x = tl.load(at, mask=is_stream[:, None] & (col < dim)[None, :], other=0.0).to(tl.float32)
    found = tl.reduce(own[:, None] * x, 0, tl.standard._sum_combine)
    tl.store(out + token * dim + col, found.to(out.dtype.element_ty), mask=col < dim)
    weights += token * (num_rows - num_streams)
    if (tl.program_id(0) == 0) & (num_rows > num_streams):
        scale = tl.load(scales + 1) * factor
        raw = _rows(
            sums, base, scale, num_streams + stream, is_stream, num_rows, num_parts, block_parts
        )
        raw = output_factor / (1.0 + tl.exp(-raw)) + output_eps
        tl.store(weights + stream, raw, mask=is_stream)
        if num_rounds > 0:
            place = tl.arange(0, block_streams * block_streams)
            source, target = place // block_streams, place % block_streams
            is_there = (source < num_streams) & (target < num_streams)
            place = num_streams + source * num_streams + target  # index among the weights
            scale = tl.load(scales + 2) * factor
            raw = _rows(
                sums, base, scale, num_streams + place, is_there, num_rows, num_parts, block_parts
            )
            mixture = _mixture(raw, is_there, num_rounds, eps, block_streams)
            mixture = tl.reshape(mixture, (block_streams * block_streams,))
            tl.store(weights + place, mixture, mask=is_there)


@triton.jit
def add_streams(
    y: tensor, weights: tensor, streams: tensor, out: tensor, num_streams: constexpr,
    dim: constexpr, block_streams: constexpr, block_cols: constexpr,
) -> None:  # fmt: skip
    """Write the streams after a layer with output `y`, rounded as in the models' own code.

    `out` and `streams` are (tokens, streams, dim), `y` is (tokens, dim). A program is (columns,
    token).
    """
    token = tl.program_id(1).to(tl.int64)
    dtype: constexpr = out.dtype.element_ty
    stream, col = tl.arange(0, block_streams), tl.arange(0, block_cols)
    col += tl.program_id(0) * block_cols
    is_stream, is_col = stream < num_streams, col < dim
    weights += token * (num_streams + num_streams * num_streams)
    at = (token * num_streams + stream[:, None]) * dim + col[None, :]
    x = tl.load(streams + at, mask=is_stream[:, None] & is_col[None, :], other=0.0)
    x, own = x.to(tl.float32), tl.load(y + token * dim + col, mask=is_col, other=0.0)
    for target in tl.static_range(num_streams):
        place = num_streams + stream * num_streams + target
        mixture = tl.load(weights + place, mask=is_stream, other=0.0).to(dtype).to(tl.float32)
        mixed = tl.reduce(mixture[:, None] * x, 0, tl.standard._sum_combine).to(dtype)
        added = tl.load(weights + target).to(dtype).to(tl.float32) * own.to(tl.float32)
        found = added.to(dtype).to(tl.float32) + mixed.to(tl.float32)
        tl.store(out + (token * num_streams + target) * dim + col, found.to(dtype), mask=is_col)


class TritonStreams:
    """Mixes residual streams; see `tandem.kernels.hyper_connections.StreamKernels`."""

    def mix_in(
        self,
        connection: HyperConnection,
        streams: Tensor,
        matrix: Tensor,
        base: Tensor,
        scales: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See `StreamKernels.mix_in`."""
        out, weights = _mix_in(streams, matrix, base, scales, *connection)
        return out, weights

    def mix_out(self, y: Tensor, weights: Tensor, streams: Tensor) -> Tensor:
        """See `StreamKernels.mix_out`."""
        result: Tensor = _mix_out(y, weights, streams)
        return result


@torch.library.custom_op("tandem::mix_in", mutates_args=())
def _mix_in(
    streams: Tensor,
    matrix: Tensor,
    base: Tensor,
    scales: Tensor,
    norm_eps: float,
    eps: float,
    output_factor: float,
    output_eps: float,
    num_rounds: int,
) -> tuple[Tensor, Tensor]:
    """Compute `TritonStreams.mix_in` as one torch operation."""
    streams, matrix = streams.contiguous(), matrix.contiguous()
    *shape, num_streams, dim = streams.shape
    num_rows, num_values = matrix.shape
    num_tokens, num_parts = streams.numel() // num_values, -(-num_values // _BLOCK_VALUES)
    sums = streams.new_empty(num_tokens, num_parts, num_rows + 1, dtype=torch.float32)
    out = streams.new_empty(*shape, dim)
    weights = streams.new_empty(*shape, num_rows - num_streams, dtype=torch.float32)
    multiply_streams[num_parts, num_tokens](
        streams, matrix, sums, num_values=num_values, num_rows=num_rows, num_parts=num_parts,
        block_rows=_power_of_two(num_rows), block_values=_BLOCK_VALUES, num_warps=2 * _WARPS,
    )  # fmt: skip
    weigh_streams[-(-dim // _BLOCK_COLS), num_tokens](
        streams, sums, base, scales, out, weights if weights.numel() else out,
        num_streams=num_streams, dim=dim, num_rows=num_rows, num_parts=num_parts,
        num_rounds=num_rounds, norm_eps=norm_eps, eps=eps, output_factor=output_factor,
        output_eps=output_eps, block_parts=_power_of_two(num_parts),
        block_streams=_power_of_two(num_streams), block_cols=_BLOCK_COLS, num_warps=_WARPS,
    )  # fmt: skip
    return out, weights


@torch.library.custom_op("tandem::mix_out", mutates_args=())
def _mix_out(y: Tensor, weights: Tensor, streams: Tensor) -> Tensor:
    """Compute `TritonStreams.mix_out` as one torch operation."""
    y, weights, streams = y.contiguous(), weights.contiguous(), streams.contiguous()
    num_streams, dim = streams.shape[-2:]
    out = torch.empty_like(streams)
    add_streams[-(-dim // _BLOCK_COLS), y.numel() // dim](
        y, weights, streams, out, num_streams=num_streams, dim=dim,
        block_streams=_power_of_two(num_streams), block_cols=_BLOCK_COLS, num_warps=_WARPS,
    )  # fmt: skip
    return out


def _power_of_two(count: int) -> int:
    return max(2, 1 << (count - 1).bit_length())

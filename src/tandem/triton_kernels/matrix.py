"""Kernels for many tokens per expert: weights are decoded in registers, for matrix units.

A program computes a tile: `block_rows` rows of one expert times `block_outputs` outputs of its
matrix. All experts' tiles are computed by one launch: tile i belongs to expert `tile_expert[i]`
and begins at row `tile_first[i]`. Sums are fp32.
"""

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from tandem.triton_kernels.epilogue import PLAIN, RELU2, gated, load_bias, relu2
from tandem.triton_kernels.rows import TABLES
from tandem.triton_kernels.tiles import (
    biased_values,
    load_scales,
    load_words,
    scale_section,
    section,
)


@triton.jit
def _weights(
    data: tensor,
    scales: tensor,
    block: tensor,
    offset: tensor,
    chunk: tensor,
    table: tensor,
    num_blocks: tensor,
    num_chunks: tensor,
    packed: constexpr,
    block_outputs: constexpr,
    block_chunks: constexpr,
) -> tensor:
    """Return the decoded weights of the given outputs and chunks, (columns, outputs) fp32."""
    place = tl.arange(0, packed.per_chunk)[None, :, None]
    low, high = load_words(data, block, offset, chunk, num_blocks, num_chunks, table, packed)
    values = biased_values(low[:, None, :], high[:, None, :], place, table, packed)
    if packed.factor != 1:
        values = values * packed.factor
    if packed.offset != 0:
        values = values + packed.offset
    if packed.chunks_per_group > 0:
        scale, minimum = load_scales(
            data, scales, block, offset, chunk, num_blocks, num_chunks, packed
        )
        values = values * scale[:, None, :]
        if packed.has_minima:
            values = values + minimum[:, None, :]
    return tl.reshape(values, (block_chunks * packed.per_chunk, block_outputs))


@triton.jit
def tile_products(
    data: tensor,
    scales: tensor,
    x: tensor,
    row: tensor,
    is_row: tensor,
    outputs: tensor,
    table: tensor,
    num_cols: tensor,
    num_blocks: tensor,
    num_chunks: tensor,
    packed: constexpr,
    block_rows: constexpr,
    block_outputs: constexpr,
    block_chunks: constexpr,
    precision: constexpr,
) -> tensor:
    """Return the products of x[row] with the outputs' weights, (block_rows, block_outputs) fp32."""
    block, offset = outputs // 16, outputs % 16
    per_chunk: constexpr = packed.per_chunk
    total = tl.full((block_rows, block_outputs), 0.0, dtype=tl.float32)
    for start in range(0, num_chunks, block_chunks):
        chunk = start + tl.arange(0, block_chunks)
        weights = _weights(
            data, scales, block, offset, chunk, table, num_blocks, num_chunks, packed,
            block_outputs, block_chunks,
        )  # fmt: skip
        col = start * per_chunk + tl.arange(0, block_chunks * per_chunk)
        rows_of_x = tl.load(
            x + row[:, None] * num_cols + col[None, :],
            mask=is_row[:, None] & (col < num_cols)[None, :],
            other=0.0,
        )
        weights = weights.to(x.dtype.element_ty)
        total = tl.dot(rows_of_x, weights, total, input_precision=precision)
    return total


@triton.jit
def _tile_products(
    address: tensor,
    x: tensor,
    row: tensor,
    is_row: tensor,
    outputs: tensor,
    table: tensor,
    packed: constexpr,
    extent: constexpr,
    block_rows: constexpr,
    block_outputs: constexpr,
    block_chunks: constexpr,
    precision: constexpr,
) -> tensor:
    """Return `tile_products` for the matrix of the expert at `address`, plus its bias."""
    data = section(address, extent.data_offset, tl.int32)
    scales = scale_section(address, extent.scales_offset, packed)
    total = tile_products(
        data, scales, x, row, is_row, outputs, table, extent.num_cols, extent.num_blocks,
        extent.num_chunks, packed, block_rows, block_outputs, block_chunks, precision,
    )  # fmt: skip
    if extent.bias_offset >= 0:
        bias = section(address, extent.bias_offset, tl.float32)
        total += load_bias(bias, outputs // 16, outputs % 16, extent.num_blocks)[None, :]
    return total


@triton.jit
def _store_up(
    inner: tensor,
    values: tensor,
    row: tensor,
    is_row: tensor,
    outputs: tensor,
    num_rows: constexpr,
    epilogue: constexpr,
    block_rows: constexpr,
    block_outputs: constexpr,
) -> None:
    """Write the activation of a tile's values, which include the bias; see `matrix_up`."""
    row = row.to(tl.int64)
    if epilogue.is_gated:
        # Blocks of 16 gate outputs and 16 up outputs alternate.
        half_outputs: constexpr = block_outputs // 2
        pairs = tl.reshape(values, (block_rows, block_outputs // 32, 2, 16))
        gate, up = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        gate = tl.reshape(gate, (block_rows, half_outputs))
        up = tl.reshape(up, (block_rows, half_outputs))
        col = tl.program_id(0) * half_outputs + tl.arange(0, half_outputs)
        mask = is_row[:, None] & (col < num_rows)[None, :]
        if epilogue.activation == PLAIN:
            at = inner + row[:, None] * (2 * num_rows) + col[None, :]
            tl.store(at, gate.to(inner.dtype.element_ty), mask=mask)
            tl.store(at + num_rows, up.to(inner.dtype.element_ty), mask=mask)
        else:
            done = gated(gate, up, epilogue)
            at = inner + row[:, None] * num_rows + col[None, :]
            tl.store(at, done.to(inner.dtype.element_ty), mask=mask)
    else:
        if epilogue.activation == RELU2:
            values = relu2(values)
        at = inner + row[:, None] * num_rows + outputs[None, :]
        mask = is_row[:, None] & (outputs < num_rows)[None, :]
        tl.store(at, values.to(inner.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=TABLES)
def matrix_up(
    addresses: tensor,
    begin: tensor,
    tile_expert: tensor,
    tile_first: tensor,
    row_token: tensor,
    hidden: tensor,
    inner: tensor,
    table: tensor,
    packed: constexpr,
    extent: constexpr,
    epilogue: constexpr,
    block_rows: constexpr,
    block_outputs: constexpr,
    block_chunks: constexpr,
    precision: constexpr,
) -> None:
    """Write activation(up projection): inner (n_rows, num_rows); see `vector_up`.

    A program is (block of outputs, tile).
    """
    expert = tl.load(tile_expert + tl.program_id(1))
    first, end = tl.load(tile_first + tl.program_id(1)), tl.load(begin + expert + 1)
    if first >= end:  # an unused tile: the grid has room for the worst case
        return
    row = first + tl.arange(0, block_rows)
    is_row = row < end
    outputs = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    address = tl.load(addresses + expert)
    token = tl.load(row_token + row, mask=is_row, other=0).to(tl.int64)
    values = _tile_products(
        address, hidden, token, is_row, outputs, table, packed, extent, block_rows, block_outputs,
        block_chunks, precision,
    )  # fmt: skip
    _store_up(
        inner, values, row, is_row, outputs, extent.num_rows, epilogue, block_rows, block_outputs
    )


@triton.jit(do_not_specialize_on_alignment=TABLES)
def matrix_down(
    addresses: tensor,
    begin: tensor,
    tile_expert: tensor,
    tile_first: tensor,
    inner: tensor,
    out: tensor,
    table: tensor,
    packed: constexpr,
    extent: constexpr,
    block_rows: constexpr,
    block_outputs: constexpr,
    block_chunks: constexpr,
    precision: constexpr,
) -> None:
    """Write the down projection: out (n_rows, hidden_size) fp32.

    A program is (block of outputs, tile).
    """
    expert = tl.load(tile_expert + tl.program_id(1))
    first, end = tl.load(tile_first + tl.program_id(1)), tl.load(begin + expert + 1)
    if first >= end:  # an unused tile: the grid has room for the worst case
        return
    row = first + tl.arange(0, block_rows)
    is_row = row < end
    outputs = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    address = tl.load(addresses + expert)
    row = row.to(tl.int64)
    values = _tile_products(
        address, inner, row, is_row, outputs, table, packed, extent, block_rows, block_outputs,
        block_chunks, precision,
    )  # fmt: skip
    mask = is_row[:, None] & (outputs < extent.num_rows)[None, :]
    tl.store(out + row[:, None] * extent.num_rows + outputs[None, :], values, mask=mask)

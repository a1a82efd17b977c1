"""Many tokens per expert: weights become bf16 (or fp16) in registers and go to the matrix units.

A program computes a tile of `block_rows` rows of one expert times `block_lanes` lanes of its
matrix. Tiles of all experts are one launch: tile i is of expert `tile_expert[i]`, from row
`tile_first[i]` on. Sums are fp32.
"""

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from tandem.triton_kernels.epilogue import PLAIN, RELU2, gated, load_bias, relu2
from tandem.triton_kernels.rows import TABLES
from tandem.triton_kernels.tiles import (
    biased_values,
    load_minima,
    load_scales,
    load_words,
    scale_section,
    section,
)


@triton.jit
def _tile_products(
    data: tensor,
    scales: tensor,
    x: tensor,
    row: tensor,
    is_row: tensor,
    block: tensor,
    lane: tensor,
    num_cols: constexpr,
    num_blocks: constexpr,
    num_chunks: constexpr,
    kind: constexpr,
    per_dword: constexpr,
    chunks_per_group: constexpr,
    factor: constexpr,
    offset: constexpr,
    block_rows: constexpr,
    block_lanes: constexpr,
    block_chunks: constexpr,
    precision: constexpr,
) -> tensor:
    """Return x[row] times the lanes' rows: (block_rows, block_lanes) fp32."""
    block_cols: constexpr = block_chunks * per_dword
    total = tl.full((block_rows, block_lanes), 0.0, dtype=tl.float32)
    place = tl.arange(0, per_dword)[None, :, None]
    for start in range(0, num_chunks, block_chunks):
        chunk = start + tl.arange(0, block_chunks)
        words = load_words(data, block, lane, chunk, num_blocks, num_chunks)
        values = biased_values(words[:, None, :], place, kind)  # (chunks, per_dword, lanes)
        if factor != 1:
            values = values * factor
        if offset != 0:
            values = values + offset
        if chunks_per_group > 0:
            scale = load_scales(
                scales, block, lane, chunk, num_blocks, num_chunks, kind, chunks_per_group
            )
            values = values * scale[:, None, :]
        if kind == "int4z":
            minimum = load_minima(
                scales, block, lane, chunk, num_blocks, num_chunks, chunks_per_group
            )
            values = values + minimum[:, None, :]
        weights = tl.reshape(values, (block_cols, block_lanes)).to(x.dtype.element_ty)
        col = start * per_dword + tl.arange(0, block_cols)
        rows_of_x = tl.load(
            x + row[:, None] * num_cols + col[None, :],
            mask=is_row[:, None] & (col < num_cols)[None, :],
            other=0.0,
        )
        total = tl.dot(rows_of_x, weights, total, input_precision=precision)
    return total


@triton.jit
def _store_up(
    inner: tensor,
    values: tensor,
    row: tensor,
    is_row: tensor,
    lanes: tensor,
    num_rows: constexpr,
    activation: constexpr,
    is_gated: constexpr,
    alpha: constexpr,
    limit: constexpr,
    has_limit: constexpr,
    up_offset: constexpr,
    block_rows: constexpr,
    block_lanes: constexpr,
) -> None:
    """Write the activation of a tile; see `matrix_up`."""
    row = row.to(tl.int64)
    if is_gated:
        # Blocks of 16 gate and 16 up lanes alternate.
        half_lanes: constexpr = block_lanes // 2
        pairs = tl.reshape(values, (block_rows, block_lanes // 32, 2, 16))
        gate, up = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        gate = tl.reshape(gate, (block_rows, half_lanes))
        up = tl.reshape(up, (block_rows, half_lanes))
        col = tl.program_id(0) * half_lanes + tl.arange(0, half_lanes)
        mask = is_row[:, None] & (col < num_rows)[None, :]
        if activation == PLAIN:
            at = inner + row[:, None] * (2 * num_rows) + col[None, :]
            tl.store(at, gate.to(inner.dtype.element_ty), mask=mask)
            tl.store(at + num_rows, up.to(inner.dtype.element_ty), mask=mask)
        else:
            done = gated(gate, up, activation, alpha, limit, has_limit, up_offset)
            at = inner + row[:, None] * num_rows + col[None, :]
            tl.store(at, done.to(inner.dtype.element_ty), mask=mask)
    else:
        if activation == RELU2:
            values = relu2(values)
        at = inner + row[:, None] * num_rows + lanes[None, :]
        mask = is_row[:, None] & (lanes < num_rows)[None, :]
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
    data_offset: constexpr,
    scales_offset: constexpr,
    bias_offset: constexpr,
    num_cols: constexpr,
    num_rows: constexpr,
    num_blocks: constexpr,
    num_chunks: constexpr,
    kind: constexpr,
    per_dword: constexpr,
    chunks_per_group: constexpr,
    factor: constexpr,
    value_offset: constexpr,
    activation: constexpr,
    is_gated: constexpr,
    alpha: constexpr,
    limit: constexpr,
    has_limit: constexpr,
    up_offset: constexpr,
    block_rows: constexpr,
    block_lanes: constexpr,
    block_chunks: constexpr,
    precision: constexpr,
) -> None:
    """Write activation(up projection): inner (n_rows, num_rows); see `vector_up`."""
    expert = tl.load(tile_expert + tl.program_id(1))
    row = tl.load(tile_first + tl.program_id(1)) + tl.arange(0, block_rows)
    is_row = row < tl.load(begin + expert + 1)
    lanes = tl.program_id(0) * block_lanes + tl.arange(0, block_lanes)
    block, lane = lanes // 16, lanes % 16
    address = tl.load(addresses + expert)
    token = tl.load(row_token + row, mask=is_row, other=0).to(tl.int64)
    values = _tile_products(
        section(address, data_offset, tl.int32),
        scale_section(address, scales_offset, kind),
        hidden, token, is_row, block, lane, num_cols, num_blocks, num_chunks, kind, per_dword,
        chunks_per_group, factor, value_offset, block_rows, block_lanes, block_chunks, precision,
    )  # fmt: skip
    if bias_offset >= 0:
        bias = load_bias(section(address, bias_offset, tl.float32), block, lane, num_blocks)
        values += bias[None, :]
    _store_up(
        inner, values, row, is_row, lanes, num_rows, activation, is_gated, alpha, limit, has_limit,
        up_offset, block_rows, block_lanes,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=TABLES)
def matrix_down(
    addresses: tensor,
    begin: tensor,
    tile_expert: tensor,
    tile_first: tensor,
    inner: tensor,
    out: tensor,
    data_offset: constexpr,
    scales_offset: constexpr,
    bias_offset: constexpr,
    num_cols: constexpr,
    num_rows: constexpr,
    num_blocks: constexpr,
    num_chunks: constexpr,
    kind: constexpr,
    per_dword: constexpr,
    chunks_per_group: constexpr,
    factor: constexpr,
    value_offset: constexpr,
    block_rows: constexpr,
    block_lanes: constexpr,
    block_chunks: constexpr,
    precision: constexpr,
) -> None:
    """Write the down projection: out (n_rows, num_rows) fp32, num_rows being the hidden size."""
    expert = tl.load(tile_expert + tl.program_id(1))
    row = tl.load(tile_first + tl.program_id(1)) + tl.arange(0, block_rows)
    is_row = row < tl.load(begin + expert + 1)
    lanes = tl.program_id(0) * block_lanes + tl.arange(0, block_lanes)
    block, lane = lanes // 16, lanes % 16
    address = tl.load(addresses + expert)
    row = row.to(tl.int64)
    values = _tile_products(
        section(address, data_offset, tl.int32),
        scale_section(address, scales_offset, kind),
        inner, row, is_row, block, lane, num_cols, num_blocks, num_chunks, kind, per_dword,
        chunks_per_group, factor, value_offset, block_rows, block_lanes, block_chunks, precision,
    )  # fmt: skip
    if bias_offset >= 0:
        bias = load_bias(section(address, bias_offset, tl.float32), block, lane, num_blocks)
        values += bias[None, :]
    mask = is_row[:, None] & (lanes < num_rows)[None, :]
    tl.store(out + row[:, None] * num_rows + lanes[None, :], values, mask=mask)

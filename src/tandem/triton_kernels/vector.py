"""Kernels for few tokens per expert: each weight is read once for all of them, at memory speed.

A program computes some rows of one expert's matrix for up to `num_tokens` tokens, a power of two.
Products are fp32 on ordinary cores; a scale is applied once per chunk, to the sum of its columns.
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
def _expert_rows(begin: tensor, expert: tensor) -> tensor:
    first = tl.load(begin + expert)
    return first, tl.load(begin + expert + 1) - first


@triton.jit
def _column(x: tensor, row: tensor, num_cols: tensor, col: tensor) -> tensor:
    return tl.load(x + row * num_cols + col, mask=col < num_cols, other=0.0).to(tl.float32)


@triton.jit
def _chunk_sums(
    low: tensor,
    high: tensor,
    x: tensor,
    rows: tensor,
    chunk: tensor,
    table: tensor,
    num_cols: tensor,
    packed: constexpr,
    num_tokens: constexpr,
    block_chunks: constexpr,
    block_outputs: constexpr,
) -> tensor:
    """Return, for each token, two sums over each chunk's columns: of biased values * x, and of x.

    The sums are tuples with an item per token: (chunks, outputs), and (chunks,).
    """
    parts = (tl.full((block_chunks, block_outputs), 0.0, dtype=tl.float32),) * num_tokens
    totals = (tl.full((block_chunks,), 0.0, dtype=tl.float32),) * num_tokens
    per_chunk: constexpr = packed.per_chunk
    for place in tl.static_range(per_chunk):
        values = biased_values(low, high, place, table, packed)
        new_parts, new_totals = (), ()
        for token in tl.static_range(num_tokens):
            column = _column(x, rows[token], num_cols, chunk * per_chunk + place)
            new_parts = new_parts + (parts[token] + values * column[:, None],)
            new_totals = new_totals + (totals[token] + column,)
        parts, totals = new_parts, new_totals
    return parts, totals


@triton.jit
def output_products(
    data: tensor,
    scales: tensor,
    x: tensor,
    rows: tensor,
    block: tensor,
    offset: tensor,
    table: tensor,
    num_cols: tensor,
    num_blocks: tensor,
    num_chunks: tensor,
    packed: constexpr,
    num_tokens: constexpr,
    block_chunks: constexpr,
    block_outputs: constexpr,
) -> tensor:
    """Return, for each token, the outputs' products with its row of x: (block_outputs,) fp32."""
    sums = (tl.full((block_chunks, block_outputs), 0.0, dtype=tl.float32),) * num_tokens
    for start in range(0, num_chunks, block_chunks):
        chunk = start + tl.arange(0, block_chunks)
        low, high = load_words(data, block, offset, chunk, num_blocks, num_chunks, table, packed)
        parts, totals = _chunk_sums(
            low, high, x, rows, chunk, table, num_cols, packed, num_tokens, block_chunks,
            block_outputs,
        )  # fmt: skip
        if packed.chunks_per_group > 0:
            scale, minimum = load_scales(
                data, scales, block, offset, chunk, num_blocks, num_chunks, packed
            )
        new_sums = ()
        for token in tl.static_range(num_tokens):
            part = parts[token] * packed.factor + packed.offset * totals[token][:, None]
            if packed.chunks_per_group > 0:
                part = part * scale
            if packed.has_minima:
                part = part + minimum * totals[token][:, None]
            new_sums = new_sums + (sums[token] + part,)
        sums = new_sums
    results = ()
    # Same as tl.sum, which the interpreter has only if Triton was imported for it.
    for token in tl.static_range(num_tokens):
        results = results + (tl.reduce(sums[token], 0, tl.standard._sum_combine),)
    return results


@triton.jit
def _products(
    address: tensor,
    x: tensor,
    rows: tensor,
    block: tensor,
    offset: tensor,
    table: tensor,
    packed: constexpr,
    extent: constexpr,
    num_tokens: constexpr,
    block_chunks: constexpr,
) -> tensor:
    """Return `output_products` for the matrix of the expert at `address`."""
    data = section(address, extent.data_offset, tl.int32)
    scales = scale_section(address, extent.scales_offset, packed)
    return output_products(
        data, scales, x, rows, block, offset, table, extent.num_cols, extent.num_blocks,
        extent.num_chunks, packed, num_tokens, block_chunks, 32,
    )  # fmt: skip


@triton.jit
def _store_up(
    inner: tensor,
    products: tensor,
    address: tensor,
    first: tensor,
    count: tensor,
    outputs: tensor,
    extent: constexpr,
    epilogue: constexpr,
    num_tokens: constexpr,
) -> None:
    """Add the bias to each token's products and write their activation; see `vector_up`."""
    block, offset = outputs // 16, outputs % 16
    num_rows: constexpr = extent.num_rows
    for token in tl.static_range(num_tokens):
        values = products[token]
        if extent.bias_offset >= 0:
            bias = section(address, extent.bias_offset, tl.float32)
            values += load_bias(bias, block, offset, extent.num_blocks)
        row = (first + token).to(tl.int64)
        is_real = count > token
        if epilogue.is_gated:
            gate, up = tl.split(tl.permute(tl.reshape(values, (2, 16)), (1, 0)))
            out_row = tl.program_id(0) * 16 + tl.arange(0, 16)
            mask = is_real & (out_row < num_rows)
            if epilogue.activation == PLAIN:
                at = inner + row * (2 * num_rows) + out_row
                tl.store(at, gate.to(inner.dtype.element_ty), mask=mask)
                tl.store(at + num_rows, up.to(inner.dtype.element_ty), mask=mask)
            else:
                done = gated(gate, up, epilogue)
                at = inner + row * num_rows + out_row
                tl.store(at, done.to(inner.dtype.element_ty), mask=mask)
        else:
            if epilogue.activation == RELU2:
                values = relu2(values)
            at = inner + row * num_rows + outputs
            tl.store(at, values.to(inner.dtype.element_ty), mask=is_real & (outputs < num_rows))


@triton.jit(do_not_specialize_on_alignment=TABLES)
def vector_up(
    addresses: tensor,
    begin: tensor,
    row_token: tensor,
    hidden: tensor,
    inner: tensor,
    table: tensor,
    packed: constexpr,
    extent: constexpr,
    epilogue: constexpr,
    num_tokens: constexpr,
    block_chunks: constexpr,
) -> None:
    """Write activation(up projection) of 32 outputs: inner (n_rows, num_rows).

    A program is (32 outputs, expert); experts at address 0 are skipped. `num_rows` is the
    intermediate size; with PLAIN gated experts inner is (n_rows, 2 * num_rows), the gate first.
    """
    outputs = tl.program_id(0) * 32 + tl.arange(0, 32)
    expert = tl.program_id(1)
    address = tl.load(addresses + expert)
    if address != 0:
        first, count = _expert_rows(begin, expert)
        rows = ()
        for token in tl.static_range(num_tokens):
            # Tokens beyond the last repeat it; their results are not stored.
            row = first + tl.minimum(count - 1, token)
            rows = rows + (tl.load(row_token + row).to(tl.int64),)
        products = _products(
            address, hidden, rows, outputs // 16, outputs % 16, table, packed, extent, num_tokens,
            block_chunks,
        )  # fmt: skip
        _store_up(inner, products, address, first, count, outputs, extent, epilogue, num_tokens)


@triton.jit(do_not_specialize_on_alignment=TABLES)
def vector_down(
    addresses: tensor,
    begin: tensor,
    inner: tensor,
    out: tensor,
    table: tensor,
    packed: constexpr,
    extent: constexpr,
    num_tokens: constexpr,
    block_chunks: constexpr,
) -> None:
    """Write the down projection of 32 outputs: out (n_rows, hidden_size) fp32.

    A program is (32 outputs, expert); experts at address 0 are skipped.
    """
    outputs = tl.program_id(0) * 32 + tl.arange(0, 32)
    block, offset = outputs // 16, outputs % 16
    num_rows: constexpr = extent.num_rows
    expert = tl.program_id(1)
    address = tl.load(addresses + expert)
    if address != 0:
        first, count = _expert_rows(begin, expert)
        rows = ()
        for token in tl.static_range(num_tokens):
            rows = rows + ((first + tl.minimum(count - 1, token)).to(tl.int64),)
        products = _products(
            address, inner, rows, block, offset, table, packed, extent, num_tokens, block_chunks
        )
        for token in tl.static_range(num_tokens):
            values = products[token]
            if extent.bias_offset >= 0:
                bias = section(address, extent.bias_offset, tl.float32)
                values += load_bias(bias, block, offset, extent.num_blocks)
            at = out + (first + token).to(tl.int64) * num_rows + outputs
            tl.store(at, values, mask=(count > token) & (outputs < num_rows))

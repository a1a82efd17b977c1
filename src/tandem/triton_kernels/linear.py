"""Products of rows with a packed matrix of any shape: linear layers of a format share kernels.

Shapes are arguments, because otherwise a kernel would be compiled for each of a model's shapes. For
the same reason, the compiler must not specialise on the alignment of some arguments.
"""

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from tandem.triton_kernels.epilogue import load_bias
from tandem.triton_kernels.matrix import tile_products
from tandem.triton_kernels.tiles import scale_section, section
from tandem.triton_kernels.vector import output_products

_ANY = ("num_rows", "num_blocks", "num_chunks", "num_biased", "scales_offset", "bias_offset")
_OF_A_LAYER = ("num_outputs", "num_blocks", "num_biased", "scales_offset", "bias_offset")
_ANY_OF_THREE = (
    "num_rows",
    "num_chunks",
    *(name + layer for layer in ("", "_b", "_c") for name in _OF_A_LAYER),
)


@triton.jit(do_not_specialize=_ANY)
def few_rows(
    x: tensor,
    out: tensor,
    image: tensor,
    table: tensor,
    num_rows: tensor,
    num_cols: tensor,
    num_outputs: tensor,
    num_blocks: tensor,
    num_chunks: tensor,
    num_biased: tensor,
    scales_offset: tensor,
    bias_offset: tensor,
    packed: constexpr,
    num_tokens: constexpr,
    block_chunks: constexpr,
) -> None:
    """Write x (num_rows, num_cols) @ matrix.T to out (num_rows, num_outputs).

    Each program computes 32 outputs. `image` is the address of the packed matrix; its first
    `num_biased` blocks have a bias. `num_tokens` is the compiled upper bound of `num_rows`.
    """
    outputs = tl.program_id(0) * 32 + tl.arange(0, 32)
    layer = out, image.to(tl.int64), num_outputs, num_blocks, num_biased, scales_offset, bias_offset
    _outputs_of_few_rows(
        x, table, num_rows, num_cols, num_chunks, layer, outputs, packed, num_tokens, block_chunks
    )


@triton.jit
def _outputs_of_few_rows(
    x: tensor,
    table: tensor,
    num_rows: tensor,
    num_cols: tensor,
    num_chunks: tensor,
    layer: tensor,
    outputs: tensor,
    packed: constexpr,
    num_tokens: constexpr,
    block_chunks: constexpr,
) -> None:
    """Write the given outputs like `few_rows`; `layer` is a tuple of the layer's own arguments."""
    out, address, num_outputs, num_blocks, num_biased, scales_offset, bias_offset = layer
    block, offset = outputs // 16, outputs % 16
    data = section(address, 0, tl.int32)
    scales = scale_section(address, scales_offset, packed)
    rows = ()
    for token in tl.static_range(num_tokens):
        # Tokens beyond the last repeat the last row; their results are not stored.
        rows = rows + (tl.minimum(num_rows - 1, token).to(tl.int64),)
    products = output_products(
        data, scales, x, rows, block, offset, table, num_cols, num_blocks, num_chunks, packed,
        num_tokens, block_chunks, 32,
    )  # fmt: skip
    bias = load_bias(section(address, bias_offset, tl.float32), block, offset, num_biased)
    for token in tl.static_range(num_tokens):
        values = (products[token] + bias).to(out.dtype.element_ty)
        at = out + rows[token] * num_outputs + outputs
        tl.store(at, values, mask=(num_rows > token) & (outputs < num_outputs))


@triton.jit(do_not_specialize=_ANY_OF_THREE)
def few_rows_of_three(
    x: tensor,
    table: tensor,
    num_rows: tensor,
    num_cols: tensor,
    num_chunks: tensor,
    out: tensor,
    image: tensor,
    num_outputs: tensor,
    num_blocks: tensor,
    num_biased: tensor,
    scales_offset: tensor,
    bias_offset: tensor,
    out_b: tensor,
    image_b: tensor,
    num_outputs_b: tensor,
    num_blocks_b: tensor,
    num_biased_b: tensor,
    scales_offset_b: tensor,
    bias_offset_b: tensor,
    out_c: tensor,
    image_c: tensor,
    num_outputs_c: tensor,
    num_blocks_c: tensor,
    num_biased_c: tensor,
    scales_offset_c: tensor,
    bias_offset_c: tensor,
    packed: constexpr,
    num_tokens: constexpr,
    block_chunks: constexpr,
) -> None:
    """Compute `few_rows` for up to three layers with the same x; a missing layer has 0 blocks.

    The layers' arguments are separate, because Triton would compile a kernel for each tuple's
    values.
    """
    first_b = (num_blocks + 1) // 2  # one program has 32 outputs, which are two blocks
    first_c = first_b + (num_blocks_b + 1) // 2
    program = tl.program_id(0)
    is_a, is_b = program < first_b, program < first_c
    address = _one_of(is_a, is_b, image.to(tl.int64), image_b.to(tl.int64), image_c.to(tl.int64))
    there = _one_of(is_a, is_b, out.to(tl.int64), out_b.to(tl.int64), out_c.to(tl.int64))
    outputs = (program - _one_of(is_a, is_b, 0, first_b, first_c)) * 32 + tl.arange(0, 32)
    layer = (
        there.to(tl.pointer_type(out.dtype.element_ty)),
        address,
        _one_of(is_a, is_b, num_outputs, num_outputs_b, num_outputs_c),
        _one_of(is_a, is_b, num_blocks, num_blocks_b, num_blocks_c),
        _one_of(is_a, is_b, num_biased, num_biased_b, num_biased_c),
        _one_of(is_a, is_b, scales_offset, scales_offset_b, scales_offset_c),
        _one_of(is_a, is_b, bias_offset, bias_offset_b, bias_offset_c),
    )
    _outputs_of_few_rows(
        x, table, num_rows, num_cols, num_chunks, layer, outputs, packed, num_tokens, block_chunks
    )


@triton.jit
def _one_of(is_a: tensor, is_b: tensor, a: tensor, b: tensor, c: tensor) -> tensor:
    return tl.where(is_a, a, tl.where(is_b, b, c))


@triton.jit(do_not_specialize=_ANY)
def many_rows(
    x: tensor,
    out: tensor,
    image: tensor,
    table: tensor,
    num_rows: tensor,
    num_cols: tensor,
    num_outputs: tensor,
    num_blocks: tensor,
    num_chunks: tensor,
    num_biased: tensor,
    scales_offset: tensor,
    bias_offset: tensor,
    packed: constexpr,
    block_rows: constexpr,
    block_outputs: constexpr,
    block_chunks: constexpr,
    precision: constexpr,
) -> None:
    """Compute the same product as `few_rows`; a program is (block of outputs, block of rows)."""
    row = (tl.program_id(1) * block_rows + tl.arange(0, block_rows)).to(tl.int64)
    is_row = row < num_rows
    outputs = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    address = image.to(tl.int64)
    data = section(address, 0, tl.int32)
    scales = scale_section(address, scales_offset, packed)
    values = tile_products(
        data, scales, x, row, is_row, outputs, table, num_cols, num_blocks, num_chunks, packed,
        block_rows, block_outputs, block_chunks, precision,
    )  # fmt: skip
    bias = section(address, bias_offset, tl.float32)
    values += load_bias(bias, outputs // 16, outputs % 16, num_biased)[None, :]
    at = out + row[:, None] * num_outputs + outputs[None, :]
    mask = is_row[:, None] & (outputs < num_outputs)[None, :]
    tl.store(at, values.to(out.dtype.element_ty), mask=mask)

"""The constants that describe a packed matrix to a kernel, which is compiled for them.

They describe layout and meaning of weights, and do not include a format's name; see
`docs/formats.md`.
"""

import functools
from dataclasses import dataclass, field

from tandem.kernels.formats.grids import Grid
from tandem.kernels.formats.weight_format import ROWS_PER_BLOCK, Encoding, WeightFormat


@dataclass(frozen=True, slots=True)
class Packed:
    """How a format stores and encodes the numbers of packed matrices of any shape.

    Columns are read in chunks: a chunk's columns share a dword of the codes' lowest plane.
    """

    per_chunk: int
    element: str
    bits: int
    low_bits: int
    """Width of the lowest plane of the codes, in bits."""
    high_bits: int
    """Width of the plane with the higher bits; 0: no such plane."""
    factor: float
    """Weight before scaling = factor * (result of `biased_values`) + offset."""
    offset: float

    scale: str
    """The type of scales; "": no scales."""
    has_minima: bool
    chunks_per_group: int
    groups_per_super: int
    """Groups per super-block; 0: the row is one super-block, or there are no scales."""
    factor_bytes: int
    """Bytes of a super-block's factor: 2 (fp16) or 4 (fp32); 0: no factor."""
    group_stride: int
    """Distance between the scales of neighbouring groups, in elements; in bytes with
    super-blocks."""

    table: tuple[float, ...] = field(repr=False, compare=False, default=())
    """Values of codes of table formats; kernels read them from memory."""
    grid: Grid | None = None
    """How words encode lines of a grid; a line's numbers become 4-bit codes in a dword."""
    lines_of: int = field(repr=False, compare=False, default=-1)
    """The number of the format whose grid lines the kernels read from memory; -1: no lines."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The shape of one packed matrix, and the offsets of its data, scales and bias in bytes."""

    num_rows: int
    """The number of rows; for a gated projection, of the gate's rows only."""
    num_cols: int
    num_blocks: int
    """The number of stored blocks of 16 rows."""
    num_chunks: int
    data_offset: int
    scales_offset: int
    bias_offset: int
    """The offset of the bias; -1: no bias."""


@functools.lru_cache(maxsize=64)
def packed_as(fmt: WeightFormat) -> Packed:
    """Return the constants that describe a format to the kernels."""
    encoding = fmt.encoding
    low_bits, *higher = encoding.planes if encoding.grid is None else (4,)
    assert len(higher) <= 1, "codes have at most two planes"
    per_chunk = 32 // low_bits
    factor, offset = _factor_and_offset(encoding)
    # A nibble line holds a scale and a minimum.
    lines = 1 if encoding.scale == "nibble" else encoding.lines
    group_cols = fmt.group_size or 0
    return Packed(
        per_chunk=per_chunk,
        element=encoding.element,
        bits=encoding.bits,
        low_bits=low_bits,
        high_bits=higher[0] if higher else 0,
        factor=factor,
        offset=offset,
        scale=encoding.scale or "",
        has_minima=encoding.has_minima,
        chunks_per_group=group_cols // per_chunk,
        groups_per_super=encoding.super_cols // group_cols if encoding.super_cols > 0 else 0,
        factor_bytes=encoding.super_bytes // encoding.lines,
        group_stride=ROWS_PER_BLOCK * lines,
        table=encoding.table,
        grid=encoding.grid,
        lines_of=-1 if encoding.grid is None else encoding.number,
    )


def extent_of(
    fmt: WeightFormat,
    sections: tuple[int, int, int],
    cols: int,
    rows: int,
    blocks: int,
    *,
    has_bias: bool,
) -> Extent:
    """Return the extent of a matrix; `sections` are the offsets of data, scales and bias.

    `blocks` is the number of blocks of 16 rows in memory; for a gated projection, `rows` counts the
    gate's rows only.
    """
    data, scales, bias = sections
    chunks = fmt.padded_cols(cols) // packed_as(fmt).per_chunk
    return Extent(rows, cols, blocks, chunks, data, scales, bias if has_bias else -1)


def _factor_and_offset(encoding: Encoding) -> tuple[float, float]:
    """Return `Packed.factor` and `Packed.offset` for an encoding."""
    match encoding.element:
        case "integer":  # the code becomes the upper bits of the mantissa of a number from 1 to 2
            return float(1 << encoding.bits), float(-(1 << encoding.bits) - encoding.offset)
        case "e4m3":  # the bits become a half's, whose exponent has another bias
            return 256.0, 0.0
        case "e2m1":
            return 16384.0, 0.0
    return 1.0, 0.0

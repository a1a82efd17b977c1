"""What a kernel must know of one packed matrix: a constant that it is compiled for.

It says how the weights lie and what they stand for, never a format's name; see `docs/formats.md`.
"""

from dataclasses import dataclass, field

from tandem.kernels.formats.weight_format import ROWS_PER_BLOCK, Encoding, WeightFormat


@dataclass(frozen=True, slots=True)
class Packed:
    """One packed matrix of an expert, or of a dense layer.

    Columns are read in chunks, as many as lie in a dword of the codes' lowest plane. Numbers of
    scales are in elements of their type, or bytes where there are super-blocks.
    """

    num_rows: int
    """Of a gated projection the gate's alone."""
    num_cols: int
    num_blocks: int
    """Of 16 rows, in memory."""
    num_chunks: int
    per_chunk: int
    data_offset: int
    scales_offset: int
    bias_offset: int
    """-1: no bias."""

    element: str
    bits: int
    low_bits: int
    """Width of the lowest plane."""
    high_bits: int
    """Width of the plane above it; 0: there is none."""
    factor: float
    """A weight, before scaling, is factor * what `biased_values` returns + offset."""
    offset: float

    scale: str
    """Its type; "": there are no scales."""
    has_minima: bool
    chunks_per_group: int
    num_groups: int
    num_supers: int
    """Super-blocks of a row; 0: there are none."""
    super_bytes: int
    """Of the scales of a super-block's 16 rows."""
    factor_bytes: int
    """Of one factor: 2 (fp16) or 4 (fp32)."""
    group_stride: int
    """From one group's scales to the next's."""

    table: tuple[float, ...] = field(repr=False, compare=False, default=())
    """What codes stand for, of tables; the kernels get it in memory."""


def packed_matrix(
    fmt: WeightFormat,
    sections: tuple[int, int, int],
    cols: int,
    rows: int,
    blocks: int,
    *,
    has_bias: bool,
) -> Packed:
    """Return a packed matrix with its data, scales and bias at offsets from its address.

    `blocks` are those of 16 rows in memory; of a gated projection `rows` are the gate's alone.
    """
    encoding = fmt.encoding
    low_bits, *higher = encoding.planes
    assert len(higher) <= 1, "codes have at most two planes"
    per_chunk = 32 // low_bits
    num_groups = fmt.padded_cols(cols) // fmt.group_size if fmt.group_size else 0
    factor, offset = _factor_and_offset(encoding)
    # Nibbles hold a scale and its minimum.
    lines = 1 if encoding.scale == "nibble" else encoding.lines
    num_supers = fmt.supers(cols)
    return Packed(
        num_rows=rows,
        num_cols=cols,
        num_blocks=blocks,
        num_chunks=fmt.padded_cols(cols) // per_chunk,
        per_chunk=per_chunk,
        data_offset=sections[0],
        scales_offset=sections[1],
        bias_offset=sections[2] if has_bias else -1,
        element=encoding.element,
        bits=encoding.bits,
        low_bits=low_bits,
        high_bits=higher[0] if higher else 0,
        factor=factor,
        offset=offset,
        scale=encoding.scale or "",
        has_minima=encoding.has_minima,
        chunks_per_group=(fmt.group_size or 0) // per_chunk,
        num_groups=num_groups,
        num_supers=num_supers,
        super_bytes=fmt.scale_bytes(ROWS_PER_BLOCK, cols) // num_supers if num_supers else 0,
        factor_bytes=encoding.super_bytes // encoding.lines,
        group_stride=ROWS_PER_BLOCK * lines,
        table=encoding.table,
    )


def _factor_and_offset(encoding: Encoding) -> tuple[float, float]:
    """Return what turns the kernels' biased values into weights before scaling."""
    match encoding.element:
        case "integer":  # the code becomes the upper mantissa of a number from 1 to 2
            return float(1 << encoding.bits), float(-(1 << encoding.bits) - encoding.offset)
        case "e4m3":  # in a half's bits, whose exponent counts from another number
            return 256.0, 0.0
        case "e2m1":
            return 16384.0, 0.0
    return 1.0, 0.0

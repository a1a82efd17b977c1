"""Packs a matrix from weights or from codes, and unpacks it to values."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.kernels.formats.blocks import SCALE_DTYPES, CodedMatrix, MatrixBlocks
from tandem.kernels.formats.codes import decode
from tandem.kernels.formats.native_quantize import Rounding, quantize_natively
from tandem.kernels.formats.quantize import quantize
from tandem.kernels.formats.weight_format import ROWS_PER_BLOCK, WeightFormat
from tandem.kernels.memory import allocate

_CHUNK_WEIGHTS = 1 << 18  # weights that the reference rounds at a time


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A (rows, cols) matrix in the layout that the kernels read.

    `data` is flat uint8. `scales` is flat, in float16, uint8 (scales of one byte, super-blocks) or
    float32 (fp8). It is None for formats without groups, and for `iq1_m`, whose `data` includes
    the scales.
    """

    format: WeightFormat
    rows: int
    cols: int
    data: Tensor
    scales: Tensor | None

    @classmethod
    def empty(cls, rows: int, cols: int, fmt: WeightFormat) -> "PackedMatrix":
        """Allocate the memory of a (rows, cols) matrix."""
        data, scale_bytes = allocate(fmt.data_bytes(rows, cols)), fmt.scale_bytes(rows, cols)
        if fmt.encoding.scale is None or not scale_bytes:
            return cls(fmt, rows, cols, data, None)
        dtype = SCALE_DTYPES[fmt.encoding.scale]
        return cls(fmt, rows, cols, data, allocate(scale_bytes).view(dtype))

    @property
    def blocks(self) -> MatrixBlocks:
        """A view of the memory, block by block."""
        return MatrixBlocks.over(self.format, self.rows, self.cols, self.data, self.scales)


def pack(
    weight: Tensor,
    fmt: WeightFormat,
    *,
    importance: Tensor | None = None,
    has_search: bool = True,
    name: str = "weight",
) -> PackedMatrix:
    """Return a (rows, cols) matrix of any floating dtype, rounded to a format and packed.

    `importance` (cols,) weighs the squared errors of the columns when scales are searched.
    Raises `ModelError` with `name` for NaN, infinity and weights too large for the format.
    """
    packed = PackedMatrix.empty(weight.shape[0], weight.shape[1], fmt)
    write_weight(
        packed.blocks, fmt, weight, importance=importance, has_search=has_search, name=name
    )
    return packed


def unpack(packed: PackedMatrix) -> Tensor:
    """Return the values of a packed matrix: (rows, cols) fp32."""
    values = decode(packed.blocks.read(packed.format), packed.format)
    return values[: packed.rows, : packed.cols].contiguous()


def write_weight(
    blocks: MatrixBlocks,
    fmt: WeightFormat,
    weight: Tensor,
    *,
    importance: Tensor | None = None,
    has_search: bool = True,
    name: str = "weight",
) -> None:
    """Round (rows, cols) weights, of any stride, into the blocks that they fill; see `pack`."""
    write_weights([Rounding(blocks, fmt, weight, name, importance)], has_search=has_search)


def write_weights(roundings: Sequence[Rounding], *, has_search: bool = True) -> None:
    """Round several matrices with torch's number of threads; `importance` must not be padded.

    Raises `ModelError` with the name of a matrix whose weights are not finite or too large for its
    format.
    """
    ready = [r._replace(importance=_column_importance(r)) for r in roundings]
    if quantize_natively(ready, has_search=has_search):
        return
    for rounding in ready:
        if len(ready) == 1 or not quantize_natively([rounding], has_search=has_search):
            write_by_reference(rounding, has_search=has_search)


def _column_importance(rounding: Rounding) -> Tensor | None:
    """Return the columns' importance, including padding; None if all columns count equally."""
    _, fmt, weight, _, importance = rounding
    cols, width = weight.shape[1], fmt.padded_cols(weight.shape[1])
    if importance is None and not fmt.encoding.has_zero and width > cols:
        # Without a zero code, padding must not count in the search.
        importance = torch.ones(cols, device="cpu")
    return None if importance is None else F.pad(importance.float(), (0, width - cols))


def write_by_reference(rounding: Rounding, *, has_search: bool) -> None:
    """Round a matrix by `quantize`, whose `ModelError` says why weights do not fit the format."""
    blocks, fmt, weight, name, importance = rounding
    width = fmt.padded_cols(weight.shape[1])
    step = max(1, _CHUNK_WEIGHTS // width // ROWS_PER_BLOCK) * ROWS_PER_BLOCK
    for start in range(0, weight.shape[0], step):
        part = weight[start : start + step].float()  # (up to step, cols)
        part = _padded(part, fmt.padded_rows(part.shape[0]), width)
        coded = quantize(part, fmt, importance=importance, has_search=has_search, name=name)
        blocks.write(fmt, start // ROWS_PER_BLOCK, coded)


def write_codes(
    blocks: MatrixBlocks, fmt: WeightFormat, coded: CodedMatrix, *, name: str = "weight"
) -> None:
    """Write (rows, cols) codes into the blocks that they fill.

    Raises `ModelError` with `name` if the columns do not fill super-blocks, or if fp8 scales differ
    within a block.
    """
    rows, cols = (fmt.padded_rows(coded.codes.shape[0]), fmt.padded_cols(coded.codes.shape[1]))
    if fmt.encoding.rows_per_scale > 1 and coded.scales is not None:
        _require_block_scales(coded.scales, fmt, name)
    if fmt.encoding.super_cols > 0 and coded.codes.shape[1] != cols:
        raise ModelError(
            f"{name} has {coded.codes.shape[1]} columns, expected whole super-blocks of "
            f"{fmt.encoding.super_cols} for {fmt.name}; dequantise the matrix and pack its values"
        )
    padded = coded.with_each(lambda part: _padded(part, rows, part.shape[1]))
    codes = _padded(coded.codes, rows, cols, fmt.encoding.offset)
    padded = dataclasses.replace(padded, codes=codes)
    if padded.scales is not None and fmt.group_size and padded.minima is None:
        scales = _padded(padded.scales, rows, cols // fmt.group_size)  # scales of half a strip
        padded = dataclasses.replace(padded, scales=scales)
    blocks.write(fmt, 0, padded)


def _require_block_scales(scales: Tensor, fmt: WeightFormat, name: str) -> None:
    of_block = scales[::ROWS_PER_BLOCK].repeat_interleave(ROWS_PER_BLOCK, dim=0)
    if not torch.equal(of_block[: scales.shape[0]], scales):
        raise ModelError(
            f"{name} has {fmt.name} scales that change inside a block of {ROWS_PER_BLOCK} rows, "
            "expected one for all of them; dequantise the matrix and pack its values"
        )


def _padded(part: Tensor, rows: int, cols: int, value: int = 0) -> Tensor:
    if part.shape == (rows, cols):
        return part  # F.pad would copy
    return F.pad(part, (0, cols - part.shape[1], 0, rows - part.shape[0]), value=value)

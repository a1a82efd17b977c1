"""One packed matrix: pack, unpack, and codes of checkpoints that are quantised already."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.formats.blocks import SCALE_DTYPES, CodedMatrix, MatrixBlocks
from tandem.kernels.formats.quantize import E8M0_BIAS, INT4_OFFSET, INT8_OFFSET, quantize
from tandem.kernels.formats.weight_format import ROWS_PER_BLOCK, WeightFormat

# Weights quantised at once: few enough to stay in a core's cache, enough to feed its vector unit.
CHUNK_WEIGHTS = 1 << 17


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A (rows, cols) matrix in the layout that the kernels read.

    `data` is flat uint8, `scales` flat in its own dtype (float16; uint8 for mxfp4's E8M0; float32
    for fp8), or None for formats without groups.
    """

    format: WeightFormat
    rows: int
    cols: int
    data: Tensor
    scales: Tensor | None

    @classmethod
    def empty(cls, rows: int, cols: int, fmt: WeightFormat) -> "PackedMatrix":
        """Allocate the memory of a (rows, cols) matrix."""
        data = torch.empty(fmt.data_bytes(rows, cols), dtype=torch.uint8)
        if fmt.group_size is None:
            return cls(fmt, rows, cols, data, None)
        dtype = SCALE_DTYPES[fmt.kind]
        scales = torch.empty(fmt.scale_bytes(rows, cols) // dtype.itemsize, dtype=dtype)
        return cls(fmt, rows, cols, data, scales)

    @property
    def blocks(self) -> MatrixBlocks:
        """View the memory block by block."""
        return MatrixBlocks.over(self.format, self.rows, self.cols, self.data, self.scales)


def pack(
    weight: Tensor,
    fmt: WeightFormat,
    *,
    importance: Tensor | None = None,
    has_search: bool = True,
    name: str = "weight",
) -> PackedMatrix:
    """Round a (rows, cols) matrix of any floating dtype to a format and place it.

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
    """Round (rows, cols) weights, of any stride, into blocks that have room for just them."""
    rows, cols = weight.shape
    missing = fmt.padded_cols(cols) - cols
    if importance is not None:
        importance = F.pad(importance, (0, missing))
    step = max(1, CHUNK_WEIGHTS // fmt.padded_cols(cols) // ROWS_PER_BLOCK) * ROWS_PER_BLOCK
    for start in range(0, rows, step):
        part = weight[start : start + step].float()  # (up to step, cols)
        part = F.pad(part, (0, missing, 0, -part.shape[0] % ROWS_PER_BLOCK))
        coded = quantize(part, fmt, importance=importance, has_search=has_search, name=name)
        blocks.write(fmt, start // ROWS_PER_BLOCK, coded)


def decode(coded: CodedMatrix, fmt: WeightFormat) -> Tensor:
    """Return the values that codes stand for: (rows, cols) fp32."""
    if coded.scales is None or fmt.group_size is None:
        return coded.codes.float()
    values = _code_values(coded.codes, fmt).unflatten(1, (-1, fmt.group_size))
    if fmt.kind == "mxfp4":
        scales = torch.ldexp(torch.ones(()), coded.scales.int() - E8M0_BIAS)
    else:
        scales = coded.scales.float()
    values = values * scales[:, :, None]
    if coded.minima is not None:
        values += coded.minima.float()[:, :, None]
    return values.flatten(1)


def _code_values(codes: Tensor, fmt: WeightFormat) -> Tensor:
    if fmt.kind == "int4":
        return codes.float() - INT4_OFFSET
    if fmt.kind == "int8":
        return codes.float() - INT8_OFFSET
    if fmt.kind == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    if fmt.kind == "mxfp4":
        magnitude = (codes & 7).float()
        values = torch.maximum(torch.maximum(magnitude * 0.5, magnitude - 2), magnitude * 2 - 8)
        return torch.where(codes < 8, values, -values)
    return codes.float()

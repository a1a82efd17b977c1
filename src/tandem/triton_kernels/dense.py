"""One packed matrix on a GPU: nn.Linear's product, few or many rows, on the experts' kernels."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.dense import DenseWeight
from tandem.kernels.formats.packed import PackedMatrix
from tandem.kernels.formats.weight_format import (
    ROWS_PER_BLOCK,
    SECTION_ALIGNMENT_BYTES,
    WeightFormat,
    find_format,
)
from tandem.triton_kernels.experts import TritonExperts
from tandem.triton_kernels.packed import Packed, packed_matrix
from tandem.triton_kernels.rows import MAX_VECTOR_TOKENS, TILE_ROWS, GroupedRows

_MATRIX_UNITS = (8, 0)  # the capability from which on Triton can use them


class DeviceWeight(NamedTuple):
    """A packed weight in the memory of a device."""

    image: Tensor  # (n,) uint8: codes, scales, the bias in fp32
    address: Tensor  # (1,) int64, on the device too: where the image is
    format: str
    in_features: int
    out_features: int
    has_bias: bool


def bring(weight: DenseWeight, device: torch.device) -> DeviceWeight:
    """Return a packed weight of the host on a device."""
    matrix, bias = weight.matrix, weight.bias
    parts = [matrix.data, matrix.scales, bias]
    offsets = _sections(matrix.format, matrix.rows, matrix.cols)
    end = offsets[2] + (0 if bias is None else bias.nbytes)
    host = torch.zeros(_aligned(end), dtype=torch.uint8, device="cpu")
    for offset, part in zip(offsets, parts, strict=True):
        if part is not None:
            host[offset : offset + part.nbytes] = part.view(torch.uint8)
    image = host.to(device)
    address = torch.tensor([image.data_ptr()], device=device)
    shape = matrix.cols, matrix.rows
    return DeviceWeight(image, address, matrix.format.name, *shape, has_bias=bias is not None)


def fetch(weight: DeviceWeight) -> DenseWeight:
    """Return a copy of a packed weight on the host."""
    fmt, shape = find_format(weight.format), (weight.out_features, weight.in_features)
    matrix = PackedMatrix.empty(*shape, fmt)
    bias = torch.empty(fmt.padded_rows(shape[0]), device="cpu") if weight.has_bias else None
    for offset, part in zip(
        _sections(fmt, *shape), (matrix.data, matrix.scales, bias), strict=True
    ):
        if part is not None:
            part.view(torch.uint8).copy_(weight.image[offset : offset + part.nbytes])
    return DenseWeight(matrix, bias)


def multiply(x: Tensor, weight: DeviceWeight) -> Tensor:
    """Return x @ weight.T + bias in the dtype of x: (..., in_features) -> (..., out_features)."""
    rows = x.reshape(-1, weight.in_features).contiguous()
    out: Tensor = _packed_linear(rows, *weight)
    return out.view(*x.shape[:-1], weight.out_features)


@torch.library.custom_op("tandem::packed_linear", mutates_args=())
def _packed_linear(
    x: Tensor,
    image: Tensor,
    address: Tensor,
    format_name: str,
    in_features: int,
    out_features: int,
    has_bias: bool,
) -> Tensor:
    """Multiply rows (n, in_features); one operation of torch, so that recordings see it."""
    out = torch.empty(len(x), out_features, dtype=x.dtype, device=x.device)
    if len(x):
        packed = _matrix(format_name, in_features, out_features, has_bias)
        begin, tile_expert, tile_first, block = _tables(len(x), x.device)
        rows = GroupedRows(address, begin, begin, tile_expert, tile_first, len(x), block)
        _experts(x.device).multiply(packed, rows, x, out)
    return out


@functools.lru_cache(maxsize=8)
def _experts(device: torch.device) -> TritonExperts:
    is_new = device.type != "cuda" or torch.cuda.get_device_capability(device) >= _MATRIX_UNITS
    return TritonExperts(has_matrix_units=is_new)


@functools.lru_cache(maxsize=256)
def _matrix(format_name: str, cols: int, rows: int, has_bias: bool) -> Packed:
    fmt = find_format(format_name)
    blocks = -(-rows // ROWS_PER_BLOCK)
    return packed_matrix(fmt, _sections(fmt, rows, cols), cols, rows, blocks, has_bias=has_bias)


def _sections(fmt: WeightFormat, rows: int, cols: int) -> tuple[int, int, int]:
    """Return where codes, scales and bias begin."""
    scales = _aligned(fmt.data_bytes(rows, cols))
    return 0, scales, _aligned(scales + fmt.scale_bytes(rows, cols))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // SECTION_ALIGNMENT_BYTES) * SECTION_ALIGNMENT_BYTES


@functools.lru_cache(maxsize=64)
def _tables(num_rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return begin, the tiles' expert and first row, and a tile's rows, 0 for few rows."""
    is_few = num_rows <= MAX_VECTOR_TOKENS
    block = 0 if is_few else next((n for n in TILE_ROWS if n >= num_rows), TILE_ROWS[-1])
    num_tiles = 0 if is_few else -(-num_rows // block)
    with torch.inference_mode(False):
        begin = torch.tensor([0, num_rows], dtype=torch.int32, device=device)
        first = torch.arange(num_tiles, dtype=torch.int32, device=device) * block
        return begin, torch.zeros_like(first), first, block

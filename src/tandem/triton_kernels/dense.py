"""Products of nn.Linear with packed matrices on a GPU; all layers of a format share kernels."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.kernels.dense import DenseWeight
from tandem.kernels.formats.packed import PackedMatrix
from tandem.kernels.formats.weight_format import (
    ROWS_PER_BLOCK,
    WeightFormat,
    aligned,
    find_format,
)
from tandem.triton_kernels import linear
from tandem.triton_kernels.experts import DEFAULT_TILINGS, VECTOR_OUTPUTS, table_on
from tandem.triton_kernels.packed import Packed, packed_as
from tandem.triton_kernels.rows import MAX_VECTOR_TOKENS, block_rows, vector_tokens

_MATRIX_UNITS = (8, 0)  # the oldest capability on which Triton uses them


class DeviceWeight(NamedTuple):
    """A packed weight in device memory."""

    image: Tensor  # (n,) uint8: codes, scales, the bias in fp32
    format: str
    in_features: int
    out_features: int
    has_bias: bool


def copy_to_device(weight: DenseWeight, device: torch.device) -> DeviceWeight:
    """Copy a packed weight from the host to a device."""
    matrix, bias = weight.matrix, weight.bias
    parts = [matrix.data, matrix.scales, bias]
    offsets = _sections(matrix.format, matrix.rows, matrix.cols)
    end = offsets[2] + (0 if bias is None else bias.nbytes)
    host = torch.zeros(aligned(end), dtype=torch.uint8, device="cpu")
    for offset, part in zip(offsets, parts, strict=True):
        if part is not None:
            host[offset : offset + part.nbytes] = part.view(torch.uint8)
    image = host.to(device)
    shape = matrix.cols, matrix.rows
    return DeviceWeight(image, matrix.format.name, *shape, has_bias=bias is not None)


def fetch(weight: DeviceWeight) -> DenseWeight:
    """Copy a packed weight from a device to the host."""
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
    format_name: str,
    in_features: int,
    out_features: int,
    has_bias: bool,
) -> Tensor:
    """Compute `multiply` for rows (n, in_features) as one torch operation, for recordings."""
    out = torch.empty(len(x), out_features, dtype=x.dtype, device=x.device)
    if len(x):
        fmt = find_format(format_name)
        packed, num_blocks = packed_as(fmt), -(-out_features // ROWS_PER_BLOCK)
        _, scales, bias = _sections(fmt, out_features, in_features)
        num_chunks = fmt.padded_cols(in_features) // packed.per_chunk
        kernel, grid, constants = _launch(packed, len(x), num_blocks, x.dtype, x.device)
        kernel[grid](
            x, out, image, table_on(packed.table, packed.lines_of, x.device), len(x),
            in_features, out_features, num_blocks, num_chunks, num_blocks if has_bias else 0,
            scales, bias, packed=packed, **constants,
        )  # fmt: skip
    return out


MOST_TOGETHER = 3
"""The largest number of layers in one launch."""


def can_join(rows: int, *weights: DeviceWeight) -> bool:
    """Tell whether products of `rows` rows with these weights can be one launch."""
    kinds = {(weight.format, weight.in_features) for weight in weights}
    return len(kinds) == 1 and 0 < rows <= MAX_VECTOR_TOKENS


def multiply_together(x: Tensor, weights: Sequence[DeviceWeight]) -> list[Tensor]:
    """Return x (n, in_features) times each weight, (n, out_features).

    `can_join` must be true, with at most `MOST_TOGETHER` weights.
    """
    first, *_ = weights
    fmt = find_format(first.format)
    packed = packed_as(fmt)
    outs = [torch.empty(len(x), w.out_features, dtype=x.dtype, device=x.device) for w in weights]
    layers: list[Any] = []
    num_programs = 0
    for out, weight in zip(outs, weights, strict=True):
        num_blocks = -(-weight.out_features // ROWS_PER_BLOCK)
        _, scales, bias = _sections(fmt, weight.out_features, weight.in_features)
        num_biased = num_blocks if weight.has_bias else 0
        layers += [out, weight.image, weight.out_features, num_blocks, num_biased, scales, bias]
        num_programs += -(-num_blocks * ROWS_PER_BLOCK // VECTOR_OUTPUTS)
    nothing = [outs[0], first.image, 0, 0, 0, 0, 0]
    linear.few_rows_of_three[(num_programs,)](
        x, table_on(packed.table, packed.lines_of, x.device), len(x), first.in_features,
        fmt.padded_cols(first.in_features) // packed.per_chunk,
        *layers, *nothing * (MOST_TOGETHER - len(weights)), packed=packed,
        **DEFAULT_TILINGS.vector_constants(packed, vector_tokens(len(x))),
    )  # fmt: skip
    return outs


@functools.lru_cache(maxsize=256)
def _launch(
    packed: Packed, num_rows: int, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> tuple[Any, tuple[int, ...], dict[str, Any]]:
    """Return the kernel for `num_rows` rows, with its grid and its compile-time constants."""
    padded_outputs, block = ROWS_PER_BLOCK * num_blocks, block_rows(num_rows, num_rows)
    if not block:
        constants = DEFAULT_TILINGS.vector_constants(packed, vector_tokens(num_rows))
        return linear.few_rows, (-(-padded_outputs // VECTOR_OUTPUTS),), constants
    is_new = device.type != "cuda" or torch.cuda.get_device_capability(device) >= _MATRIX_UNITS
    constants = DEFAULT_TILINGS.matrix_constants(packed, block, dtype, has_matrix_units=is_new)
    grid = (-(-padded_outputs // constants["block_outputs"]), -(-num_rows // block))
    return linear.many_rows, grid, constants


def _sections(fmt: WeightFormat, rows: int, cols: int) -> tuple[int, int, int]:
    """Return the offsets of codes, scales and bias in `DeviceWeight.image`, in bytes."""
    scales = aligned(fmt.data_bytes(rows, cols))
    return 0, scales, aligned(scales + fmt.scale_bytes(rows, cols))

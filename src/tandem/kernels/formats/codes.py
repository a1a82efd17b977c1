"""Converts stored codes to the values that they stand for, and values to the nearest codes."""

import torch
from torch import Tensor

from tandem.kernels.formats.blocks import CodedMatrix
from tandem.kernels.formats.weight_format import WeightFormat

E8M0_BIAS = 127
E2M1_SIGN = 8


def decode(coded: CodedMatrix, fmt: WeightFormat) -> Tensor:
    """Return the values of codes: (rows, cols) fp32; cols must be whole groups."""
    if coded.scales is None or fmt.group_size is None:
        return coded.codes.float()
    values: Tensor = code_values(coded.codes, fmt).unflatten(1, (-1, fmt.group_size))
    scales = coded.scales
    if fmt.encoding.scale == "e8m0":
        scales = power_of_two(scales.int() - E8M0_BIAS)
    elif fmt.encoding.scale == "e4m3":
        scales = scales.view(torch.float8_e4m3fn)
    values *= of_groups(scales, coded.super_scales)[:, :, None]
    if coded.minima is not None:
        values += of_groups(coded.minima, coded.super_minima)[:, :, None]
    return values.flatten(1)


def of_groups(numbers: Tensor, factors: Tensor | None) -> Tensor:
    """Return scales or minima (rows, groups) in fp32, times the `factors` of their super-blocks.

    An fp16 factor times a byte is exact in fp32; an fp32 factor of a row rounds once.
    """
    values = numbers.float()
    if factors is None:
        return values
    each = values.shape[1] // factors.shape[1]
    return values * factors.float().repeat_interleave(each, dim=1)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent exactly, in fp32, for int32 exponents -127..127."""
    bits = torch.where(exponent == -127, 1 << 22, (exponent + 127) << 23)  # 2^-127 is subnormal
    return bits.int().view(torch.float32)


def e2m1_magnitude(code: Tensor) -> Tensor:
    """Return 0, 0.5, 1, 1.5, 2, 3, 4, 6 for the fp32 codes 0..7."""
    return torch.maximum(torch.maximum(code * 0.5, code - 2), code * 2 - 8)


def nearest_codes(values: Tensor, fmt: WeightFormat) -> Tensor:
    """Return the stored codes (uint8) whose unscaled values are nearest to `values`."""
    encoding = fmt.encoding
    if not encoding.table:
        return values.round().clamp_(*encoding.codes).add_(encoding.offset).to(torch.uint8)
    table, codes = torch.tensor(encoding.table, dtype=torch.float32, device="cpu").sort()
    middles = (table[1:] + table[:-1]) / 2
    return codes.to(torch.uint8)[torch.bucketize(values.contiguous(), middles)]


def code_values(codes: Tensor, fmt: WeightFormat) -> Tensor:
    """Return the unscaled fp32 values of stored codes, in a new tensor."""
    match fmt.encoding.element:
        case "e4m3":
            return codes.view(torch.float8_e4m3fn).float()
        case "e2m1":
            magnitude = e2m1_magnitude((codes & (E2M1_SIGN - 1)).float())
            return torch.where(codes < E2M1_SIGN, magnitude, -magnitude)
        case "table":
            return torch.tensor(fmt.encoding.table, dtype=torch.float32, device="cpu")[codes.int()]
    return codes.float().sub_(fmt.encoding.offset)

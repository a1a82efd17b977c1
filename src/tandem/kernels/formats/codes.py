"""What a stored code stands for: the offsets, and values from codes and scales."""

import torch
from torch import Tensor

from tandem.kernels.formats.blocks import CodedMatrix
from tandem.kernels.formats.weight_format import Kind, WeightFormat

INT4_OFFSET, INT8_OFFSET = 8, 128
E8M0_BIAS = 127
E2M1_SIGN = 8

# The code that padding gets: its value is zero, or it is scaled by zero.
ZERO_CODES: dict[Kind, int] = {
    "int4": INT4_OFFSET,
    "int4z": 0,
    "int8": INT8_OFFSET,
    "mxfp4": 0,
    "fp8": 0,
    "bf16": 0,
    "fp16": 0,
}


def decode(coded: CodedMatrix, fmt: WeightFormat) -> Tensor:
    """Return the values that codes stand for: (rows, cols) fp32, cols being whole groups."""
    if coded.scales is None or fmt.group_size is None:
        return coded.codes.float()
    values: Tensor = _code_values(coded.codes, fmt).unflatten(1, (-1, fmt.group_size))
    scales = power_of_two(coded.scales.int() - E8M0_BIAS) if fmt.kind == "mxfp4" else coded.scales
    values *= scales.float()[:, :, None]
    if coded.minima is not None:
        values += coded.minima.float()[:, :, None]
    return values.flatten(1)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent exactly, in fp32, for int32 exponents -127..127."""
    bits = torch.where(exponent == -127, 1 << 22, (exponent + 127) << 23)  # 2^-127 is subnormal
    return bits.int().view(torch.float32)


def e2m1_magnitude(code: Tensor) -> Tensor:
    """Return 0, 0.5, 1, 1.5, 2, 3, 4, 6 for the fp32 codes 0..7."""
    return torch.maximum(torch.maximum(code * 0.5, code - 2), code * 2 - 8)


def _code_values(codes: Tensor, fmt: WeightFormat) -> Tensor:
    """Return fp32 values before scaling, in memory of their own."""
    match fmt.kind:
        case "int4":
            return codes.float().sub_(INT4_OFFSET)
        case "int8":
            return codes.float().sub_(INT8_OFFSET)
        case "fp8":
            return codes.view(torch.float8_e4m3fn).float()
        case "mxfp4":
            magnitude = e2m1_magnitude((codes & (E2M1_SIGN - 1)).float())
            return torch.where(codes < E2M1_SIGN, magnitude, -magnitude)
    return codes.float()

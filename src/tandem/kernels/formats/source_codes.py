"""Checks the codes of already quantised checkpoints, and converts them without rounding."""

import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.kernels.formats.blocks import CodedMatrix
from tandem.kernels.formats.microfloat import LARGEST_E8M0
from tandem.kernels.formats.weight_format import WeightFormat

FP8_BLOCK_ROWS = 128
E4M3_NAN = 0x7F  # without the sign bit


def coded_matrix(
    codes: Tensor,
    scales: Tensor,
    fmt: WeightFormat,
    *,
    zeros: Tensor | None = None,
    name: str = "weight",
) -> CodedMatrix:
    """Check a source's codes and return them in the layout's form, row by row.

    `codes` is (rows, cols): whole numbers -8..7 for int4, -128..127 for int8, 0..15 for int4z and
    for mxfp4 (e2m1 bits, sign highest); float8_e4m3fn or its bits as uint8 for fp8. `scales` is
    (rows, groups): floating-point, uint8 E8M0 for mxfp4; for fp8 (rows / 128, cols / 128), rounded
    up. `zeros` (rows, groups) is for formats with minima (int4z): value = (code - zero) * scale,
    where zero * scale is rounded to fp16. Raises `ModelError` with `name` for numbers that do not
    fit exactly.
    """
    if fmt.group_size is None:
        raise ModelError(f"{name}: {fmt.name} has no codes and scales; use pack for its weights")
    rows, cols = codes.shape
    groups = -(-cols // fmt.group_size)
    if fmt.encoding.element == "e4m3":
        _require_shape(scales, (-(-rows // FP8_BLOCK_ROWS), groups), f"{name}'s scales")
        return _coded_fp8(codes, scales, rows, name)
    _require_shape(scales, (rows, groups), f"{name}'s scales")
    stored = _stored_codes(codes, fmt, name)
    if fmt.encoding.scale == "e8m0":
        return CodedMatrix(stored, _require_e8m0(scales, name))
    half = _exact_half(scales, f"{name}'s scales")
    if not fmt.encoding.has_minima:
        return CodedMatrix(stored, half)
    if zeros is None:
        raise ModelError(f"{name} has no zero points, but {fmt.name} needs them; use int4")
    _require_shape(zeros, (rows, groups), f"{name}'s zero points")
    minima = minima_of(zeros, half)
    _require_finite(minima, f"{name}'s zero points times scales")
    return CodedMatrix(stored, half, minima)


def minima_of(zeros: Tensor, scales: Tensor) -> Tensor:
    """Return the minima of zero points: -(zero * scale), rounded to fp16."""
    return (-zeros.float() * scales.float()).half()


def stored_matrix(coded: CodedMatrix, name: str) -> CodedMatrix:
    """Return a matrix of stored codes unchanged; `ModelError` for scales that are not finite."""
    for part in coded.parts[1:]:
        if part is not None and part.is_floating_point():
            _require_finite(part, f"{name}'s scales")
    return coded


def _stored_codes(codes: Tensor, fmt: WeightFormat, name: str) -> Tensor:
    low, high = fmt.encoding.codes
    if codes.numel() and not (low <= codes.min() and codes.max() <= high):
        raise ModelError(
            f"{name} has codes from {codes.min()} to {codes.max()}, expected {low} to {high} for "
            f"{fmt.name}; unpack the checkpoint's codes to one per element, or choose its format"
        )
    return (codes.to(torch.int16) + fmt.encoding.offset).to(torch.uint8)


def _coded_fp8(codes: Tensor, scales: Tensor, rows: int, name: str) -> CodedMatrix:
    bits = codes.view(torch.uint8)
    if ((bits & E4M3_NAN) == E4M3_NAN).any():
        raise ModelError(f"{name} has NaN among its e4m3 codes; download or convert it again")
    _require_finite(scales, f"{name}'s scales")
    return CodedMatrix(bits, scales.float().repeat_interleave(FP8_BLOCK_ROWS, dim=0)[:rows])


def _require_e8m0(scales: Tensor, name: str) -> Tensor:
    if scales.dtype != torch.uint8 or (scales > LARGEST_E8M0).any():
        raise ModelError(
            f"{name} has {scales.dtype} scales up to {scales.max()}, expected E8M0 bytes up to "
            f"{LARGEST_E8M0} (255 is NaN, and beyond {LARGEST_E8M0} values leave fp32)"
        )
    return scales


def _exact_half(values: Tensor, name: str) -> Tensor:
    """Return the same numbers as fp16; a bfloat16 scale from 2^-17 to 65,280 always fits."""
    _require_finite(values, name)
    half = values.half()
    changed = half.float() != values.float()
    if changed.any():
        raise ModelError(
            f"{name} hold {values[changed][0].item():.9g}, which fp16 cannot hold exactly (and "
            f"{int(changed.sum()) - 1} more such); dequantise the matrix and pack its values"
        )
    return half


def _require_finite(values: Tensor, name: str) -> None:
    if not values.isfinite().all():
        raise ModelError(
            f"{name} hold NaN or infinity, expected finite numbers; the checkpoint is damaged: "
            "download or convert it again"
        )


def _require_shape(found: Tensor, expected: tuple[int, int], name: str) -> None:
    if tuple(found.shape) != expected:
        raise ModelError(
            f"{name} have shape {tuple(found.shape)}, expected {expected}; give one line of "
            "groups per output row, transposed if the checkpoint has the other order"
        )

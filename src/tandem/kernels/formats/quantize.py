"""Rounds weights to a format by that format's rule. Knows values, not memory layouts."""

import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.kernels.formats.blocks import FLOAT_DTYPES, CodedMatrix
from tandem.kernels.formats.grid_search import round_to_lines
from tandem.kernels.formats.microfloat import fit_mxfp4, round_e4m3, round_nvfp4
from tandem.kernels.formats.scale_search import (
    INT3_PEAKS,
    INT3_RANGE,
    INT4_PEAKS,
    INT4_RANGE,
    INT5_PEAKS,
    INT5_RANGE,
    INT6_PEAKS,
    INT6_RANGE,
    INT8_PEAKS,
    INT8_RANGE,
    fit_affine,
    fit_symmetric,
    fit_table,
)
from tandem.kernels.formats.super_blocks import round_to_supers
from tandem.kernels.formats.weight_format import WeightFormat

_SYMMETRIC = {
    3: (INT3_PEAKS, INT3_RANGE),
    4: (INT4_PEAKS, INT4_RANGE),
    5: (INT5_PEAKS, INT5_RANGE),
    6: (INT6_PEAKS, INT6_RANGE),
    8: (INT8_PEAKS, INT8_RANGE),
}


def quantize(
    weight: Tensor,
    fmt: WeightFormat,
    *,
    importance: Tensor | None = None,
    has_search: bool = True,
    name: str = "weight",
) -> CodedMatrix:
    """Round (rows, cols) fp32 weights, whole blocks and whole groups, to codes and scales.

    The scale of each group minimises sum(importance * (weight - value)^2); `importance` is (cols,),
    None means equal importance. Without the search, and always for fp8 and nvfp4, the scale follows
    from the largest magnitude. Raises `ModelError` with `name` for NaN, infinity, weights too large
    for the format, and formats `iq1_s` and `iq1_m`.
    """
    if fmt.kind.startswith("iq1"):
        raise ModelError(
            f"{name} cannot be rounded to {fmt.name}, which is only read from files that have it; "
            "choose another format, such as iq2_xxs, iq2_s or iq3_s"
        )
    if fmt.group_size is None:
        codes = weight.to(FLOAT_DTYPES[fmt.encoding.element])
        _require_finite(codes, weight, fmt, name)
        return CodedMatrix(codes)
    x = weight.unflatten(1, (-1, fmt.group_size))  # (rows, groups, group_size)
    low, high = x.amin(-1), x.amax(-1)
    if importance is not None:
        importance = importance.unflatten(0, (-1, fmt.group_size))
    for extreme in (low, high):
        _require_finite(extreme, extreme, fmt, name)
    coded = _fit(x, low, high, fmt, importance, has_search)
    for part in coded.parts[1:]:
        if part is not None and part.is_floating_point():
            _require_finite(part, torch.maximum(-low, high), fmt, name)
    return coded


def _fit(
    x: Tensor,
    low: Tensor,
    high: Tensor,
    fmt: WeightFormat,
    importance: Tensor | None,
    has_search: bool,
) -> CodedMatrix:
    peak = torch.where(high > -low, high, low)  # the weight of the largest magnitude, with its sign
    if fmt.encoding.grid is not None:
        return round_to_lines(x, importance, fmt, has_search=has_search)
    match fmt.encoding.element:
        case "integer" if fmt.encoding.super_cols:
            searches = (False, True) if has_search else (False,)
            fits = [_fit_integers(x, low, high, peak, fmt, importance, s)[1:] for s in searches]
            return round_to_supers(x, fits, importance, fmt, is_stretched=has_search)
        case "table":
            codes, scales = fit_table(x, peak, importance, fmt, has_search=has_search)
            if not fmt.encoding.super_cols:
                return CodedMatrix(codes.flatten(1), scales)
            _, plain = fit_table(x, peak, importance, fmt, has_search=False)
            fits = [(plain, None), (scales, None)]
            return round_to_supers(x, fits, importance, fmt, is_stretched=has_search)
        case "integer":
            fit = _fit_integers(x, low, high, peak, fmt, importance, has_search)
            return CodedMatrix(_stored(fit[0]), *fit[1:])
        case "e2m1" if fmt.encoding.super_cols:
            codes, scales, factors = round_nvfp4(x, peak.abs())
            return CodedMatrix(_stored(codes), scales, super_scales=factors)
        case "e2m1":
            codes, scales = fit_mxfp4(x, peak.abs(), importance, has_search=has_search)
            return CodedMatrix(_stored(codes), scales)
        case "e4m3":
            codes, scales = round_e4m3(x, peak.abs())
            return CodedMatrix(codes.flatten(1), scales)
    raise AssertionError(fmt.kind)


def _fit_integers(
    x: Tensor,
    low: Tensor,
    high: Tensor,
    peak: Tensor,
    fmt: WeightFormat,
    importance: Tensor | None,
    has_search: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return stored codes, fp16 scales, and fp16 minima where the format has them."""
    encoding = fmt.encoding
    if encoding.has_minima:
        top = encoding.codes[1]
        return fit_affine(x, low, high, importance, top, has_search=has_search)
    peaks, limits = _SYMMETRIC[fmt.bits]
    peaks = peaks if has_search else peaks[:1]
    codes, scales = fit_symmetric(x, peak, importance, peaks, limits)
    return codes.add_(encoding.offset), scales, None


def _stored(codes: Tensor) -> Tensor:
    return codes.to(torch.uint8).flatten(1)


def _require_finite(found: Tensor, source: Tensor, fmt: WeightFormat, name: str) -> None:
    """Raise `ModelError` if `found` is not finite; the message says whether `source` was finite."""
    if found.isfinite().all():
        return
    if not source.isfinite().all():
        raise ModelError(
            f"{name} has weights that are NaN or infinite, expected finite ones; the checkpoint is "
            "damaged or was saved with an overflow: download or convert it again"
        )
    raise ModelError(
        f"{name} has weights too large for {fmt.name}, largest magnitude "
        f"{source.abs().max():.4g}; use bf16"
    )

"""Round weights to a format, with a search for the best scale of each group."""

import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.kernels.formats.blocks import CodedMatrix
from tandem.kernels.formats.weight_format import WeightFormat

INT4_OFFSET, INT8_OFFSET = 8, 128
E4M3_MAX = 448.0
E8M0_BIAS = 127
LARGEST_E8M0 = 252  # 6 * 2^(252 - 127) is the last that fp32 can hold

# Where a group's weight of largest magnitude may come to lie among the codes; the scale that
# follows is refitted. The first is absmax. Chosen by measurement, see docs/formats.md.
INT4_PEAKS = (7.0, -8.0, -7.4, -8.6)
INT8_PEAKS = (127.0, 126.0, 125.0)
INT4Z_SHRINKS = (1.0, 0.95, 0.9)


def quantize(
    weight: Tensor,
    fmt: WeightFormat,
    *,
    importance: Tensor | None = None,
    has_search: bool = True,
    name: str = "weight",
) -> CodedMatrix:
    """Round (rows, cols) fp32 weights, cols being whole groups, to codes and scales.

    The scale of each group minimises sum(importance * (weight - value)^2); `importance` is (cols,),
    None weighs all alike. Without the search the scale is the one of the largest magnitude.
    Raises `ModelError` with `name` for NaN, infinity and weights too large for the format.
    """
    if fmt.group_size is None:
        return CodedMatrix(_convert(weight, fmt, name))
    groups = weight.unflatten(1, (-1, fmt.group_size))  # (rows, groups, group_size)
    if importance is not None:
        importance = importance.float().unflatten(0, (-1, fmt.group_size))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    _require_finite(low, high, fmt, name)
    if fmt.kind == "int4":
        codes, scales = _round_symmetric(
            groups, low, high, importance, INT4_PEAKS if has_search else INT4_PEAKS[:1], (-8, 7)
        )
        coded = CodedMatrix(_to_codes(codes, INT4_OFFSET), _line(scales, name, fmt))
    elif fmt.kind == "int8":
        codes, scales = _round_symmetric(
            groups,
            low,
            high,
            importance,
            INT8_PEAKS if has_search else INT8_PEAKS[:1],
            (-127, 127),
        )
        coded = CodedMatrix(_to_codes(codes, INT8_OFFSET), _line(scales, name, fmt))
    elif fmt.kind == "mxfp4":
        coded = _round_mxfp4(groups, low, high, importance, has_search)
    elif fmt.kind == "fp8":
        coded = _round_fp8(groups, low, high)
    else:
        raise NotImplementedError
    return coded


def _require_finite(low: Tensor, high: Tensor, fmt: WeightFormat, name: str) -> None:
    if not (low.isfinite().all() and high.isfinite().all()):
        raise ModelError(
            f"{name} has NaN or infinite weights, which {fmt.name} cannot hold; the checkpoint is "
            "damaged, or was converted with an overflow: download or convert it again"
        )


def _line(scales: Tensor, name: str, fmt: WeightFormat) -> Tensor:
    half = scales.squeeze(-1).half()
    if not half.isfinite().all():
        raise ModelError(f"{name} has weights too large for {fmt.name}")
    return half


def _to_codes(codes: Tensor, offset: int) -> Tensor:
    return (codes + offset).to(torch.uint8).flatten(1)


def _convert(weight: Tensor, fmt: WeightFormat, name: str) -> Tensor:
    codes = weight.to(torch.bfloat16 if fmt.kind == "bf16" else torch.float16)
    if not codes.isfinite().all():
        if weight.isfinite().all():
            raise ModelError(f"{name} has weights too large for {fmt.name}")
        raise ModelError(f"{name} has NaN or infinite weights")
    return codes


def _inverse(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 0.0, scales.reciprocal())


def _round_symmetric(
    x: Tensor,
    low: Tensor,
    high: Tensor,
    importance: Tensor | None,
    peaks: tuple[float, ...],
    limits: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Return codes (float, shape of x) and scales (..., 1) that fp16 holds exactly."""
    peak = torch.where(high > -low, high, low)
    weighted = x if importance is None else x * importance
    best_scales = best_errors = peak  # set by the first candidate
    for place, at in enumerate(peaks):
        scales = (peak / at).half().float()
        if len(peaks) == 1:
            best_scales = scales
            break
        q = (x * _inverse(scales)).round_().clamp_(*limits)
        along = (q * weighted).sum(-1, keepdim=True)
        square = (q.square_() if importance is None else q.square_() * importance).sum(
            -1, keepdim=True
        )
        scales = (along * _inverse(square)).half().float()  # the best scale for these codes
        errors = scales * (scales * square - 2 * along)
        if place == 0:
            best_scales, best_errors = scales, errors
        else:
            better = errors < best_errors
            best_scales = torch.where(better, scales, best_scales)
            best_errors = torch.minimum(errors, best_errors)
    q = (x * _inverse(best_scales)).round_().clamp_(*limits)
    return q, best_scales


def _round_mxfp4(
    x: Tensor, low: Tensor, high: Tensor, importance: Tensor | None, has_search: bool
) -> CodedMatrix:
    peak = torch.maximum(high, -low)
    exponent = torch.frexp(peak).exponent - 3  # OCP MX: the peak's own exponent less e2m1's
    exponent = exponent.clamp_(-E8M0_BIAS, LARGEST_E8M0 - E8M0_BIAS)
    magnitude = x.abs()
    if has_search:
        errors = [_e2m1_error(magnitude, exponent + up, importance) for up in (0, 1)]
        exponent = exponent + (errors[1] < errors[0])
        exponent = exponent.clamp_(max=LARGEST_E8M0 - E8M0_BIAS)
    codes = _e2m1_codes(magnitude * torch.ldexp(torch.ones(()), -exponent))
    codes = codes.add_((x < 0) * 8)
    return CodedMatrix(
        codes.to(torch.uint8).flatten(1), (exponent + E8M0_BIAS).to(torch.uint8).squeeze(-1)
    )


def _e2m1_codes(magnitude: Tensor) -> Tensor:
    """Round magnitudes to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 (ties to even): codes 0..7."""
    code = torch.minimum(2 * magnitude, magnitude + 2)
    return torch.minimum(code, magnitude * 0.5 + 4).clamp_(max=7).round_()


def _e2m1_error(magnitude: Tensor, exponent: Tensor, importance: Tensor | None) -> Tensor:
    scaled = magnitude * torch.ldexp(torch.ones(()), -exponent)
    codes = _e2m1_codes(scaled)
    values = torch.maximum(torch.maximum(codes * 0.5, codes - 2), codes * 2 - 8)
    square = (scaled - values).square_()
    if importance is not None:
        square *= importance
    return torch.ldexp(square.sum(-1, keepdim=True), 2 * exponent)


def _round_fp8(x: Tensor, low: Tensor, high: Tensor) -> CodedMatrix:
    peak = torch.maximum(high, -low).unflatten(0, (-1, 16)).amax(1, keepdim=True)
    scales = (peak / E4M3_MAX).expand(-1, 16, -1, -1).flatten(0, 1)
    codes = (x / torch.where(scales == 0, 1.0, scales)).clamp_(-E4M3_MAX, E4M3_MAX)
    return CodedMatrix(
        codes.to(torch.float8_e4m3fn).view(torch.uint8).flatten(1), scales.squeeze(-1)
    )

"""Rounds groups to small floating-point numbers: MXFP4 and NVFP4 (e2m1), and block FP8 (e4m3)."""

import torch
from torch import Tensor

from tandem.kernels.formats.codes import E2M1_SIGN, E8M0_BIAS, e2m1_magnitude, power_of_two
from tandem.kernels.formats.weight_format import ROWS_PER_BLOCK

E4M3_MAX = 448.0
_E2M1_MAX = 6.0
# If the peak is larger than this, 6 * 2^e does not fit fp32. The specification allows exponents up
# to 254.
LARGEST_E8M0 = 252


def fit_mxfp4(
    x: Tensor, peak: Tensor, importance: Tensor | None, *, has_search: bool
) -> tuple[Tensor, Tensor]:
    """Return e2m1 codes 0..15 (like `x`, whole numbers) and uint8 E8M0 scales (rows, groups).

    `x` is (rows, groups, 32) fp32, `peak` (rows, groups) its largest magnitudes. Without the search
    the exponent follows the OCP MX rule: the peak's exponent minus 2, which saturates peaks above
    6 * 2^e. The search also tries the exponents above and below; the lower one may be better if
    the peak has little importance.
    """
    exponent = torch.frexp(peak).exponent - 3  # frexp returns a mantissa of 0.5 to 1
    exponent.clamp_(min=-E8M0_BIAS)
    magnitude = x.abs()
    if has_search:
        tried = [(exponent + up).clamp_(min=-E8M0_BIAS) for up in (0, 1, -1)]
        # Errors are in units of 4^exponent.
        near, far, below = (_e2m1_error(magnitude, one, importance) for one in tried)
        best = torch.stack([near, 4 * far, 0.25 * below]).argmin(0, keepdim=True)
        exponent = torch.stack(tried).gather(0, best)[0].clamp_(max=LARGEST_E8M0 - E8M0_BIAS)
    codes = _e2m1_codes(magnitude, exponent)
    codes.add_(x < 0, alpha=E2M1_SIGN)
    return codes, (exponent + E8M0_BIAS).to(torch.uint8)


def _e2m1_codes(magnitude: Tensor, exponent: Tensor) -> Tensor:
    """Return the e2m1 codes 0..7, fp32, of magnitudes with a scale of 2^exponent."""
    return _round_e2m1(magnitude * power_of_two(-exponent)[..., None])


def _round_e2m1(scaled: Tensor) -> Tensor:
    """Round to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 (ties to even codes): codes 0..7, fp32.

    Three lines pass through the codes, at steps of 0.5, 1 and 2; the lowest one gives the code.
    """
    code = torch.minimum(scaled + 2, scaled * 2)
    return torch.minimum(code, scaled.mul_(0.5).add_(4), out=code).clamp_(max=7).round_()


def _e2m1_error(magnitude: Tensor, exponent: Tensor, importance: Tensor | None) -> Tensor:
    values = e2m1_magnitude(_e2m1_codes(magnitude, exponent))
    loss = values.sub_(magnitude * power_of_two(-exponent)[..., None]).square_()
    return (loss if importance is None else loss.mul_(importance)).sum(-1)


def round_nvfp4(x: Tensor, peak: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return e2m1 codes (like `x`), e4m3 scales (rows, groups) uint8, and fp32 factors (rows, 1).

    `x` is (rows, groups, 16) fp32, `peak` (rows, groups) its largest magnitudes. As NVIDIA
    rounds, a row's factor gives the row's largest group the largest scale.
    """
    factors = peak.amax(1, keepdim=True) / (_E2M1_MAX * E4M3_MAX)
    scales = (peak / (_E2M1_MAX * torch.where(factors == 0, 1.0, factors))).clamp_(max=E4M3_MAX)
    rounded = scales.to(torch.float8_e4m3fn)
    inverse = (rounded.float() * factors).reciprocal().nan_to_num(0, 0, 0)
    codes = _round_e2m1(x.abs() * inverse[..., None])
    codes.add_(x < 0, alpha=E2M1_SIGN)
    return codes, rounded.view(torch.uint8), factors


def round_e4m3(x: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes (like `x`, uint8) and fp32 scales (rows, groups), one per 16 rows.

    `x` is (rows, groups, 128) fp32 with rows a multiple of 16, `peak` its largest magnitudes. There
    is no search: other scales than the peak's gained 2 % and took seven times as long.
    """
    blocks: Tensor = peak.unflatten(0, (-1, ROWS_PER_BLOCK))  # (blocks, 16, groups)
    scales = (blocks.amax(1, keepdim=True) / E4M3_MAX).expand_as(blocks).flatten(0, 1)
    scaled = x / torch.where(scales == 0, 1.0, scales)[..., None]
    codes = scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales

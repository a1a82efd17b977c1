"""Finds each group's scale of least error among candidates, each refitted to its codes.

For weights x of importance w and fixed codes q, the best scale has a closed form,
sum(w x q) / sum(w q q), and the same two sums give its squared error. So a candidate costs one
rounding and two sums, and the search picks the refitted scale, already rounded to fp16, of least
error. The plain scale of the largest magnitude ("absmax") is the first candidate, so no group gets
a larger error than with the plain scale.

Each candidate is a code to which a group's peak is scaled before rounding. These codes were chosen
greedily by error on the demo model and on Gaussian weights (docs/formats.md).
"""

import torch
from torch import Tensor

from tandem.kernels.formats.codes import code_values, nearest_codes
from tandem.kernels.formats.weight_format import WeightFormat

# The signed peak goes to one of the codes below. Values beyond the range saturate, and the other
# weights get finer steps.
INT3_RANGE, INT4_RANGE, INT5_RANGE = (-4, 3), (-8, 7), (-16, 15)
INT6_RANGE, INT8_RANGE = (-32, 31), (-127, 127)
# Candidates of codes. A peak of little importance may lie far beyond the range.
INT3_PEAKS: tuple[float, ...] = (3.0, -3.6, -4.0, -4.5, -4.8, -5.2, -6.0, -7.0)
INT4_PEAKS: tuple[float, ...] = (7.0, -7.6, -8.0, -8.4, -9.0, -10.0, -11.5, 8.0)
INT5_PEAKS: tuple[float, ...] = (15.0, -15.5, -16.0, -16.8, -17.6, -19.0, -21.0, 16.0)
INT6_PEAKS: tuple[float, ...] = (31.0, -31.5, -32.0, -33.0, -34.5, -36.5, -39.0, 32.0)
INT8_PEAKS: tuple[float, ...] = (127.0, 126.0, 125.0, 124.0, 122.0, 120.0, 117.0, 113.0)
# In tables, the peak goes to these shares of either end.
TABLE_SHARES = (0.75, 0.86, 0.97, 1.08, 1.2)
# (extra steps, pivot): the group's range takes this many steps more than the largest code, and the
# code at this share of the codes stays fixed.
AFFINE_REFITS = 2  # refits of the best candidate to the codes that it gives
AFFINE_STEPS = ((0.0, 0.0), (0.5, 0.0), (0.5, 1.0), (1.5, 0.5))


def fit_symmetric(
    x: Tensor,
    peak: Tensor,
    importance: Tensor | None,
    peak_codes: tuple[float, ...],
    limits: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Return codes (like `x`, whole numbers) and fp16 scales (rows, groups).

    `x` is (rows, groups, group_size) fp32, `peak` (rows, groups) the weight of largest magnitude
    with its sign, `importance` (groups, group_size). A single code in `peak_codes` means no search.
    Groups whose scale is too large for fp16 get an infinite scale.
    """
    peaks = torch.tensor(peak_codes, device="cpu")[:, None, None]
    scales = (peak / peaks).half()  # (candidates, rows, groups)
    codes = torch.empty_like(x)
    if len(peak_codes) > 1 and scales[0].isfinite().all():
        along, square = torch.empty(2, *scales.shape, device="cpu")
        product = torch.empty_like(x)
        for number, inverse in enumerate(_inverse(scales)):
            _round(x, inverse, limits, out=codes)
            weighted = codes if importance is None else codes * importance
            torch.sum(torch.mul(weighted, x, out=product), -1, out=along[number])
            torch.sum(torch.mul(weighted, codes, out=product), -1, out=square[number])
        refitted = (along * _inverse(square)).half()
        fitted = refitted.float()
        errors = fitted * (fitted * square - 2 * along)  # omits sum(w x x), which is constant
        best = errors.min(0, keepdim=True).indices  # takes a tenth of argmin's time
        scales = refitted.gather(0, best)
        # Refit again, to the codes of this scale.
        _round(x, _inverse(scales[0]), limits, out=codes)
        weighted = codes if importance is None else codes * importance
        along, square = (weighted * x).sum(-1), (weighted * codes).sum(-1)
        scales = (along * _inverse(square)).half()[None]
    _round(x, _inverse(scales[0]), limits, out=codes)
    return codes, scales[0]


def fit_table(
    x: Tensor, peak: Tensor, importance: Tensor | None, fmt: WeightFormat, *, has_search: bool
) -> tuple[Tensor, Tensor]:
    """Return stored codes (like `x`, uint8) and fp16 scales (rows, groups) of a format's table.

    The arguments are those of `fit_symmetric`. The search scales the peak to several shares of
    either end of the table, and refits each scale.
    """
    weights = torch.ones((), device="cpu") if importance is None else importance
    table = fmt.encoding.table
    scales = [(peak / max(table)).half()]
    ends = [end * share for end in (max(table), min(table)) for share in TABLE_SHARES]
    for end in ends if has_search else ():
        q = code_values(nearest_codes(x * _inverse(peak / end)[..., None], fmt), fmt)
        weighted = q * weights
        scales.append(((weighted * x).sum(-1) * _inverse((weighted * q).sum(-1))).half())
    fits = [nearest_codes(x * _inverse(scale)[..., None], fmt) for scale in scales]
    errors = torch.stack(
        [
            (code_values(q, fmt).mul_(scale.float()[..., None]).sub_(x).square_() * weights).sum(-1)
            for q, scale in zip(fits, scales, strict=True)
        ]
    )
    best = errors.nan_to_num(torch.inf).min(0, keepdim=True).indices
    chosen = torch.stack(scales).gather(0, best)[0]
    codes = torch.stack(fits).gather(0, best[..., None].expand(1, *x.shape))[0]
    return codes, chosen


def fit_affine(
    x: Tensor,
    low: Tensor,
    high: Tensor,
    importance: Tensor | None,
    top: int,
    *,
    has_search: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes 0..`top` (like `x`), fp16 scales and fp16 minima (rows, groups).

    `x` is (rows, groups, group_size) fp32, `low` and `high` are its extremes per group.
    """
    scales, minima = ((high - low) / top).half(), low.half()
    if has_search:
        weights = torch.ones((), device="cpu") if importance is None else importance
        fits = [(scales, minima), _best_affine(x, low, high, weights, top)]
        # Compute the errors again from differences: sums of squares would hide a near tie.
        errors = torch.stack([_affine_error(x, *fit, weights, top) for fit in fits])
        best = errors.min(0, keepdim=True).indices
        scales, minima = (
            torch.stack(parts).gather(0, best)[0] for parts in zip(*fits, strict=True)
        )
    codes = torch.sub(x, minima.float()[..., None])
    return _round(codes, _inverse(scales), (0, top), out=codes), scales, minima


def _best_affine(
    x: Tensor, low: Tensor, high: Tensor, weights: Tensor, top: int
) -> tuple[Tensor, Tensor]:
    """Return the refitted scales and minima of least error among `AFFINE_STEPS`."""
    # Subtracted, because otherwise the weights' common offset dominates the sums of squares.
    middle = (low + high) / 2
    around = x - middle[..., None]
    weighted = around * weights
    sum_x = weighted.sum(-1)
    fits = []
    for more, share in AFFINE_STEPS:
        steps, pivot = top + more, top * share
        offset = pivot + (top / 2 - pivot) * steps / top  # the code of the middle
        codes = around.mul(_inverse((high - low) / steps)[..., None]).add_(offset)
        codes.round_().clamp_(0, top)
        fits.append(_refit_affine(codes, weighted, sum_x, weights))
    best = torch.stack([error for _, _, error in fits]).min(0, keepdim=True).indices
    scales = torch.stack([scale for scale, _, _ in fits]).gather(0, best)[0]
    shifts = torch.stack([shift for _, shift, _ in fits]).gather(0, best)[0]
    for _ in range(AFFINE_REFITS):
        codes = _round(around - shifts[..., None], _inverse(scales), (0, top), out=codes)
        scales, shifts, _ = _refit_affine(codes, weighted, sum_x, weights)
    return scales, (shifts + middle).half()


def _refit_affine(
    codes: Tensor, weighted: Tensor, sum_x: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best fp16 scale, its minimum, and their error.

    `weighted` is the groups' weights relative to their middle, times importance. The minimum is
    relative to the middle too, and the error excludes the weights' own sum of squares.
    """
    sum_qx = torch.mul(codes, weighted).sum(-1)
    weighted_codes = codes * weights
    sum_q, sum_qq = weighted_codes.sum(-1), weighted_codes.mul_(codes).sum(-1)
    total = weights.expand(codes.shape[1:]).sum(-1)
    scales = ((total * sum_qx - sum_q * sum_x) * _inverse(total * sum_qq - sum_q * sum_q)).half()
    scale = scales.float()
    shift = (sum_x - scale * sum_q) * _inverse(total)
    error = scale * (scale * sum_qq - 2 * sum_qx + 2 * shift * sum_q)
    return scales, shift, error + shift * (shift * total - 2 * sum_x)


def _affine_error(x: Tensor, scales: Tensor, minima: Tensor, weights: Tensor, top: int) -> Tensor:
    """Return the squared error (rows, groups) of rounding with a scale and a minimum."""
    shifted = x - minima.float()[..., None]
    codes = _round(shifted, _inverse(scales), (0, top), out=torch.empty_like(shifted))
    loss = codes.mul_(scales.float()[..., None]).sub_(shifted)
    return loss.square_().mul_(weights).sum(-1)


def _round(x: Tensor, inverse: Tensor, limits: tuple[int, int], *, out: Tensor) -> Tensor:
    return torch.mul(x, inverse[..., None], out=out).round_().clamp_(*limits)


def _inverse(scales: Tensor) -> Tensor:
    """Return 1 / scale in fp32, and 0 where the scale is 0 or tiny: such groups are zero."""
    return scales.float().reciprocal().nan_to_num(0, 0, 0)

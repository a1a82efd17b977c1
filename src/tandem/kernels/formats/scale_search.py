"""The scale of each group that loses least: candidates, each refitted to its codes.

For fixed codes q the best scale has a closed form, sum(w x q) / sum(w q q), and the same two sums
give its squared error. So a candidate costs one rounding and two sums, and the search picks the
refitted scale, already rounded to fp16, of least error. The plain scale of the largest magnitude
("absmax") is the first candidate, hence no group ever gets worse than that.

Each candidate is a place among the codes where a group's peak is put before rounding. The places
were chosen greedily by error on the demo model and on Gaussian weights (docs/formats.md).
"""

import torch
from torch import Tensor

# The signed peak goes to these codes; beyond the range it saturates, and the rest gets finer steps.
INT4_RANGE, INT8_RANGE, INT4Z_RANGE = (-8, 7), (-127, 127), (0, 15)
INT4_PEAKS: tuple[float, ...] = (7.0, -8.0, -8.4, -8.9, -7.7)
INT8_PEAKS: tuple[float, ...] = (127.0, 126.0, 125.0, 124.0)
# A group's range takes this many steps, with this code's place held fixed.
INT4Z_STEPS = ((15.0, 0.0), (15.5, 0.0), (15.5, 15.0), (16.5, 7.5))


def fit_symmetric(
    x: Tensor,
    peak: Tensor,
    importance: Tensor | None,
    peak_codes: tuple[float, ...],
    limits: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Return codes (like `x`, whole numbers) and fp16 scales (rows, groups).

    `x` is (rows, groups, group_size) fp32, `peak` (rows, groups) the weight of largest magnitude
    with its sign, `importance` (groups, group_size). One code in `peak_codes`: no search. Groups
    too large for fp16 have an infinite scale.
    """
    places = torch.tensor(peak_codes)[:, None, None]
    scales = (peak / places).half()  # (candidates, rows, groups)
    codes = torch.empty_like(x)
    if len(peak_codes) > 1:
        along, square = torch.empty(2, *scales.shape)
        product = torch.empty_like(x)
        for number, inverse in enumerate(_inverse(scales)):
            _round(x, inverse, limits, out=codes)
            weighted = codes if importance is None else codes * importance
            torch.sum(torch.mul(weighted, x, out=product), -1, out=along[number])
            torch.sum(torch.mul(weighted, codes, out=product), -1, out=square[number])
        refitted = (along * _inverse(square)).half()
        fitted = refitted.float()
        errors = fitted * (fitted * square - 2 * along)  # without the constant sum(w x x)
        best = errors.argmin(0, keepdim=True)
        # A scale that fp16 cannot hold rounded everything to zero; keep it for the caller to see.
        scales = torch.where(scales[:1].isinf(), scales[:1], refitted.gather(0, best))
    _round(x, _inverse(scales[0]), limits, out=codes)
    return codes, scales[0]


def fit_affine(
    x: Tensor, low: Tensor, high: Tensor, importance: Tensor | None, *, has_search: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes 0..15 (like `x`), fp16 scales and fp16 minima (rows, groups).

    `x` is (rows, groups, group_size) fp32, `low` and `high` are its extremes per group.
    """
    scales, minima = ((high - low) / INT4Z_STEPS[0][0]).half(), low.half()
    if has_search:
        above = x - low[..., None]  # small numbers: sums of squares lose nothing to a common part
        weights = torch.ones(()) if importance is None else importance
        candidates = [(scales, minima, _fit_error(above, low, scales, minima, weights))]
        for steps, pivot in INT4Z_STEPS:
            codes = _affine_codes(above, high - low, steps, pivot)
            refitted = _refit_affine(above, codes, low, weights)
            candidates.append((*refitted, _fit_error(above, low, *refitted, weights)))
        best = torch.stack([error for _, _, error in candidates]).argmin(0, keepdim=True)
        scales = torch.stack([scale for scale, _, _ in candidates]).gather(0, best)[0]
        minima = torch.stack([minimum for _, minimum, _ in candidates]).gather(0, best)[0]
    codes = torch.sub(x, minima.float()[..., None])
    return _round(codes, _inverse(scales), INT4Z_RANGE, out=codes), scales, minima


def _affine_codes(above: Tensor, span: Tensor, steps: float, pivot: float) -> Tensor:
    """Round weights above the minimum to codes 0..15 with a step of span / steps."""
    inverse = _inverse(span / steps)
    offset = pivot * (1 - steps / INT4Z_RANGE[1])  # the pivot's place among the codes stays
    return above.mul(inverse[..., None]).add_(offset).round_().clamp_(*INT4Z_RANGE)


def _refit_affine(
    above: Tensor, codes: Tensor, low: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Solve for the best scale and minimum of fixed codes; the minimum follows fp16's scale."""
    weighted = codes * weights
    total = weights.expand(above.shape[1:]).sum(-1)
    sum_q, sum_qq = weighted.sum(-1), weighted.mul_(codes).sum(-1)
    sum_x, sum_qx = (above * weights).sum(-1), torch.mul(codes, above).mul_(weights).sum(-1)
    determinant = total * sum_qq - sum_q * sum_q
    scales = ((total * sum_qx - sum_q * sum_x) * _inverse(determinant)).half()
    minima = (sum_x - scales.float() * sum_q) * _inverse(total) + low
    return scales, minima.half()


def _fit_error(
    above: Tensor, low: Tensor, scales: Tensor, minima: Tensor, weights: Tensor
) -> Tensor:
    """Return the squared error (rows, groups) that rounding with a scale and a minimum leaves."""
    shifted = above - (minima.float() - low)[..., None]
    codes = _round(shifted, _inverse(scales), INT4Z_RANGE, out=torch.empty_like(shifted))
    loss = codes.mul_(scales.float()[..., None]).sub_(shifted)
    return loss.square_().mul_(weights).sum(-1)


def _round(x: Tensor, inverse: Tensor, limits: tuple[int, int], *, out: Tensor) -> Tensor:
    return torch.mul(x, inverse[..., None], out=out).round_().clamp_(*limits)


def _inverse(scales: Tensor) -> Tensor:
    """Return 1 / scale in fp32, and 0 where the scale is 0 or next to it: such groups are zero."""
    inverse = scales.float().reciprocal()
    return torch.where(inverse.isfinite(), inverse, 0.0)

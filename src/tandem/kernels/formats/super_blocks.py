"""Rounds groups to formats with super-blocks: scales and minima are bytes times a super-scale."""

from dataclasses import replace

import torch
from torch import Tensor

from tandem.kernels.formats.blocks import CodedMatrix
from tandem.kernels.formats.codes import decode, nearest_codes, of_groups
from tandem.kernels.formats.weight_format import WeightFormat

MOST_STRETCH = 1.25
"""The largest ratio of a factor to the factor of least error."""
_LARGEST: dict[str, int] = {"int8": 127, "nibble": 15}  # the largest numbers of the bytes


def round_to_supers(
    x: Tensor,
    fits: list[tuple[Tensor, Tensor | None]],
    importance: Tensor | None,
    fmt: WeightFormat,
    *,
    is_stretched: bool,
) -> CodedMatrix:
    """Return the codes of weights (rows, groups, group_size), by the best of several fits.

    A fit is a scale for each group, (rows, groups), and perhaps a minimum. Both are rounded to
    bytes times a super-scale, and the weights are rounded with the result. Each super-block uses
    the fit of least error. If `is_stretched`, super-scales are then enlarged as in `_stretched`.
    """
    best, least = None, torch.empty(0, device="cpu")
    for scales, minima in fits:
        rounded = _round(x, scales, minima, fmt)
        error = _error(x, rounded, importance, fmt)  # (rows, supers)
        if best is None:
            best, least = rounded, error
            continue
        best = _chosen(error < least, rounded, best)
        least = torch.minimum(error, least)
    assert best is not None, "some fit is given"
    return _stretched(x, best, importance, fmt) if is_stretched else best


def _stretched(
    x: Tensor, coded: CodedMatrix, importance: Tensor | None, fmt: WeightFormat
) -> CodedMatrix:
    """Return the codes with super-scales for which sum(w x value) is sum(w x x).

    Here x is a weight and w its importance. Scales of least error make all values too small, as
    for formats with grids. The super-scales grow at most by the factor `MOST_STRETCH`.
    """
    weighed = x if importance is None else x * importance
    values = decode(coded, fmt).view(x.shape)
    along, energy = (_by_super((weighed * other).sum(-1), fmt) for other in (values, x))
    by = (energy / along).nan_to_num(1, MOST_STRETCH, 1).clamp_(1, MOST_STRETCH)

    def stretch(factors: Tensor | None) -> Tensor | None:
        if factors is None:
            return None
        found = (factors.float() * by).half()
        return torch.where(found.isfinite(), found, factors)

    return replace(
        coded,
        super_scales=stretch(coded.super_scales),
        super_minima=stretch(coded.super_minima),
    )


def _round(x: Tensor, scales: Tensor, minima: Tensor | None, fmt: WeightFormat) -> CodedMatrix:
    own, factors = _two_levels(scales, fmt)
    low, low_factors = (None, None) if minima is None else _two_levels(minima, fmt)
    around = x
    if low is not None:
        around = x - of_groups(low, low_factors)[..., None]
    inverse = of_groups(own, factors).reciprocal().nan_to_num(0, 0, 0)
    codes = nearest_codes(around * inverse[..., None], fmt)
    return CodedMatrix(codes.flatten(1), own, low, factors, low_factors)


def _two_levels(values: Tensor, fmt: WeightFormat) -> tuple[Tensor, Tensor]:
    """Round values (rows, groups) to int8 steps times an fp16 factor; return steps and factors."""
    encoding = fmt.encoding
    assert encoding.scale is not None
    assert fmt.group_size is not None
    largest = _LARGEST[encoding.scale]
    supers: Tensor = values.float().unflatten(1, (-1, encoding.super_cols // fmt.group_size))
    low, high = supers.amin(-1), supers.amax(-1)
    # Nibbles have no sign, so the factor has the sign of the largest scale.
    lowest, peak = -largest, torch.maximum(high, -low)
    if encoding.scale == "nibble":
        lowest, peak = 0, torch.where(high > -low, high, low)
    factors = (peak / largest).half() + 0  # + 0 turns -0 into 0
    inverse = factors.float().reciprocal().nan_to_num(0, 0, 0)
    steps = (supers * inverse[..., None]).round_().clamp_(lowest, largest)
    return steps.to(torch.int8).flatten(1), factors


def _error(x: Tensor, coded: CodedMatrix, importance: Tensor | None, fmt: WeightFormat) -> Tensor:
    """Return the squared error of each super-block: (rows, supers)."""
    loss = decode(coded, fmt).view(x.shape).sub_(x).square_()
    if importance is not None:
        loss *= importance
    return _by_super(loss.sum(-1), fmt)


def _by_super(sums: Tensor, fmt: WeightFormat) -> Tensor:
    """Add up the sums of a super-block's groups: (rows, groups) to (rows, supers)."""
    assert fmt.group_size is not None
    supers: Tensor = sums.unflatten(1, (-1, fmt.encoding.super_cols // fmt.group_size))
    return supers.sum(-1)


def _chosen(is_better: Tensor, one: CodedMatrix, other: CodedMatrix) -> CodedMatrix:
    """Return the super-blocks of `one` where `is_better`, and those of `other` elsewhere."""

    def choose(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        if a is None or b is None:
            return None
        mask = is_better.repeat_interleave(a.shape[1] // is_better.shape[1], dim=1)
        return torch.where(mask, a, b)

    codes, *lines = map(choose, one.parts, other.parts)
    assert codes is not None, "every matrix has codes"
    return CodedMatrix(codes, *lines)

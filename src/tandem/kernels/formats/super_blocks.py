"""Round groups to formats with super-blocks: scales and minima are bytes of a super-scale."""

import torch
from torch import Tensor

from tandem.kernels.formats.blocks import CodedMatrix
from tandem.kernels.formats.codes import of_groups

_LARGEST = 127  # of the bytes


def round_to_supers(
    x: Tensor,
    fits: list[tuple[Tensor, Tensor | None]],
    importance: Tensor | None,
    codes: tuple[int, int],
    groups_per_super: int,
) -> CodedMatrix:
    """Return the codes of (rows, groups, group_size) weights for the best of some fits.

    A fit is a scale for each group, (rows, groups), and perhaps a minimum. Both are rounded to
    bytes of a super-scale, the weights with what comes out, and each super-block takes the fit that
    leaves it the least error. Codes are stored ones: `codes`, lowest to highest, from 0 on.
    """
    best, least = None, torch.empty(0, device="cpu")
    for scales, minima in fits:
        rounded = _round(x, scales, minima, codes, groups_per_super)
        error = _error(x, rounded, importance, codes[0], groups_per_super)  # (rows, supers)
        if best is None:
            best, least = rounded, error
            continue
        best = _chosen(error < least, rounded, best)
        least = torch.minimum(error, least)
    assert best is not None, "some fit is given"
    return best


def _round(
    x: Tensor, scales: Tensor, minima: Tensor | None, codes: tuple[int, int], groups_per_super: int
) -> CodedMatrix:
    own, factors = _two_levels(scales, groups_per_super)
    low, low_factors = (None, None) if minima is None else _two_levels(minima, groups_per_super)
    around = x
    if low is not None:
        around = x - of_groups(low, low_factors)[..., None]
    inverse = of_groups(own, factors).reciprocal().nan_to_num(0, 0, 0)
    rounded = (around * inverse[..., None]).round_().clamp_(*codes).sub_(codes[0])
    return CodedMatrix(rounded.to(torch.uint8).flatten(1), own, low, factors, low_factors)


def _two_levels(values: Tensor, groups_per_super: int) -> tuple[Tensor, Tensor]:
    """Round (rows, groups) to int8 times an fp16 factor of each super-block."""
    supers: Tensor = values.float().unflatten(1, (-1, groups_per_super))
    factors = (supers.abs().amax(-1) / _LARGEST).half()
    inverse = factors.float().reciprocal().nan_to_num(0, 0, 0)
    steps = (supers * inverse[..., None]).round_().clamp_(-_LARGEST, _LARGEST)
    return steps.to(torch.int8).flatten(1), factors


def _error(
    x: Tensor, coded: CodedMatrix, importance: Tensor | None, lowest: int, groups_per_super: int
) -> Tensor:
    """Return the squared error of each super-block: (rows, supers)."""
    assert coded.scales is not None, "these formats have scales"
    values = coded.codes.float().add_(lowest).view(x.shape)
    values *= of_groups(coded.scales, coded.super_scales)[..., None]
    if coded.minima is not None:
        values += of_groups(coded.minima, coded.super_minima)[..., None]
    loss = values.sub_(x).square_()
    if importance is not None:
        loss *= importance
    supers: Tensor = loss.sum(-1).unflatten(1, (-1, groups_per_super))
    return supers.sum(-1)


def _chosen(is_better: Tensor, one: CodedMatrix, other: CodedMatrix) -> CodedMatrix:
    """Return `one` in the super-blocks where it is better, else `other`."""

    def choose(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        if a is None or b is None:
            return None
        wanted = is_better.repeat_interleave(a.shape[1] // is_better.shape[1], dim=1)
        return torch.where(wanted, a, b)

    codes, *lines = map(choose, one.parts, other.parts)
    assert codes is not None, "every matrix has codes"
    return CodedMatrix(codes, *lines)

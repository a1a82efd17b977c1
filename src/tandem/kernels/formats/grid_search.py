"""The best lines, scales and factors for formats with a grid (IQ2 and IQ3): the reference.

A group's scale is an odd multiple of its super-block's factor. For weights x of importance w and a
scale s, a line g has the error s * (s * sum(w g g) - 2 * sum(w |x| g)) plus a constant, so every
line of the grid is tried. For chosen lines and multiples m, the factor of least error is
sum(w |x| m g) over sum(w m m g g). That factor makes all values too small in proportion to the
error, and the loss adds up over layers. The final factor is therefore sum(w x x) over
sum(w |x| m g), with which sum(w x value) is sum(w x x). Sums are added in the native code's order.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tandem.kernels.formats.blocks import CodedMatrix
from tandem.kernels.formats.grid_words import lines_of, spread
from tandem.kernels.formats.super_blocks import MOST_STRETCH
from tandem.kernels.formats.weight_format import WeightFormat

# Candidates: where the group's largest magnitude goes, as shares of the grid's largest.
GRID_SHARES = (0.7, 0.8, 0.9, 1.0, 1.12, 1.25, 1.4, 1.6)
_STEPS = 16  # steps of a group's scale; step s is the multiple 2 s + 1
_SUPER_COLS = 256


@dataclass(frozen=True, slots=True)
class _Fit:
    """A choice of lines and scales for super-blocks.

    `lines` is (rows, places) int64, where a place is the columns of one line; `steps` is (rows,
    groups) fp32; the other tensors are (rows, supers). In the module's notation, `along` is
    sum(w |x| m g), and `square` is sum(w m m g g).
    """

    lines: Tensor
    steps: Tensor
    factor: Tensor
    along: Tensor
    square: Tensor


def round_to_lines(
    x: Tensor, importance: Tensor | None, fmt: WeightFormat, *, has_search: bool
) -> CodedMatrix:
    """Return the codes of fp32 weights (rows, groups, group_size), rounded to lines of the grid.

    `importance` is (groups, group_size). With `has_search`, each super-block uses the better of the
    plain and the searched scales. Weights too large for fp16 factors get a factor that is not
    finite.
    """
    grid = _GridWeights(x, importance, fmt)
    fit = grid.stretched(grid.fit_scales(grid.peaks / grid.largest))
    if has_search:
        searched = grid.fit_scales(grid.best_scales())
        searched = grid.choose_lines(searched.factor, grid.best_steps(searched))
        fit = _better(grid.stretched(searched), fit)
    codes = grid.digits[fit.lines].flatten(1) | grid.signs << grid.sign_bit
    scales = (2 * fit.steps + 1).to(torch.int8)
    return CodedMatrix(codes.to(torch.uint8), scales, None, fit.factor.half())


class _GridWeights:
    """The magnitudes of a matrix's weights; finds lines, scales and factors of least error."""

    def __init__(self, x: Tensor, importance: Tensor | None, fmt: WeightFormat) -> None:
        encoding, self.cols = fmt.encoding, x.shape[2]
        assert encoding.grid is not None
        self.sign_bit, self._line_cols = encoding.grid.sign_bit, encoding.grid.line_cols
        one_line = lines_of(fmt)[None, None]
        self.digits = spread(one_line, self._line_cols, encoding.grid.line_bits)
        self.digits = self.digits.view(-1, self._line_cols)  # (lines, line_cols)
        table = torch.tensor(encoding.table, dtype=torch.float32, device="cpu")
        self.magnitudes = table[self.digits]
        self.largest = self.magnitudes.max()
        self.peaks = x.abs().amax(-1)
        self.weights = torch.ones_like(x[0]) if importance is None else importance
        weighed, is_even = x.abs() * self.weights, encoding.grid.signs.width == 7
        squares = (weighed * x.abs()).flatten(1).unflatten(1, (-1, _SUPER_COLS))
        self._energy = _summed(squares)  # (rows, supers)
        self.weighed, self.signs = _without_signs(
            weighed.flatten(1), x.flatten(1) < 0, is_even=is_even
        )

    @cached_property
    def squares(self) -> Tensor:
        """Return sum(w g g) of each line g at each place, (places, lines)."""
        weights = self.weights.view(1, -1, self._line_cols)
        return self._sums(weights, self.magnitudes * self.magnitudes)[0]

    @cached_property
    def along(self) -> Tensor:
        """Return sum(w |x| g) of each line g at each place, (rows, places, lines)."""
        return self._sums(self.weighed.unflatten(1, (-1, self._line_cols)), self.magnitudes)

    def _sums(self, weights: Tensor, numbers: Tensor) -> Tensor:
        """Return the products of weights (rows, places, line_cols) with numbers (lines, line_cols).

        The result is (rows, places, lines). Each half of a line's columns is summed first, as in
        the native code.
        """
        halves = []
        for columns in torch.arange(self._line_cols, device="cpu").chunk(2):
            first, *others = columns.tolist()
            total = weights[..., first, None] * numbers[:, first]
            for column in others:
                total += weights[..., column, None] * numbers[:, column]
            halves.append(total)
        return halves[0] + halves[1]

    def _by_place(self, of_groups: Tensor) -> Tensor:
        return of_groups.repeat_interleave(self.cols // self._line_cols, dim=1)

    def errors(self, scales: Tensor) -> Tensor:
        """Return half of each group's error with the best lines, for scales (rows, groups)."""
        halves = self._by_place(scales * 0.5)[..., None]
        least = (halves * self.squares - self.along).amin(-1)
        in_group = least.unflatten(1, (scales.shape[1], -1))
        return _summed(in_group) * scales

    def best_scales(self) -> Tensor:
        """Return the scale of least error of each group, from a few candidates."""
        shares = torch.tensor(GRID_SHARES, device="cpu")
        scales = torch.stack([self.peaks / (self.largest * share) for share in shares])
        errors = torch.stack([self.errors(one) for one in scales])
        return scales.gather(0, errors.argmin(0, keepdim=True))[0]

    def best_steps(self, fit: _Fit) -> Tensor:
        """Return the best step of each group among the fit's step and its two neighbours."""
        steps = torch.stack([(fit.steps + more).clamp(0, _STEPS - 1) for more in (-1, 0, 1)])
        factor = fit.factor.repeat_interleave(_SUPER_COLS // self.cols, dim=1)
        errors = torch.stack([self.errors(factor * (2 * one + 1)) for one in steps])
        # If two errors are equal, keep the present step; otherwise the lower one.
        below = torch.where(errors[0] < errors[1], steps[0], steps[1])
        least = torch.minimum(errors[0], errors[1])
        return torch.where(errors[2] < least, steps[2], below)

    def fit_scales(self, scales: Tensor) -> _Fit:
        """Round scales (rows, groups) to steps; return the fit with the best lines for them."""
        groups = _SUPER_COLS // self.cols
        largest = scales.unflatten(1, (-1, groups)).amax(-1)
        factor = (largest / (2 * _STEPS - 1)).half().float()
        inverse = _inverse(factor).repeat_interleave(groups, dim=1)
        steps = (scales * inverse * 0.5 - 0.5).clamp(0, _STEPS - 1).round()
        return self.choose_lines(factor, steps)

    def choose_lines(self, factor: Tensor, steps: Tensor) -> _Fit:
        """Return the fit with the best lines at these scales, and the best factor for the lines."""
        multiple = self._by_place(2 * steps + 1)
        places = _SUPER_COLS // self._line_cols
        half = multiple * factor.repeat_interleave(places, dim=1) * 0.5
        errors = half[..., None] * self.squares - self.along
        lines = errors.argmin(-1)  # argmin takes the first of equal errors
        least = errors.gather(2, lines[..., None])[..., 0]
        square = self.squares.expand(len(lines), -1, -1).gather(2, lines[..., None])[..., 0]
        along = _summed((multiple * (half * square - least)).unflatten(1, (-1, places)))
        square = _summed((multiple * multiple * square).unflatten(1, (-1, places)))
        return _Fit(lines, steps, (along * _inverse(square)).half().float(), along, square)

    def stretched(self, fit: _Fit) -> _Fit:
        """Return `fit` with the module's final factor, at most `MOST_STRETCH` times the best."""
        most = fit.along * _inverse(fit.square) * MOST_STRETCH
        factor = torch.minimum(self._energy * _inverse(fit.along), most)
        return replace(fit, factor=factor.half().float())


def _without_signs(sizes: Tensor, signs: Tensor, *, is_even: bool) -> tuple[Tensor, Tensor]:
    """Return weighted magnitudes (rows, cols) and signs.

    If `is_even`, the format needs an even number of negative signs in each eight columns. Where
    the number is odd, the sign of the weight of least weighted magnitude is inverted, and this
    magnitude is made negative.
    """
    if not is_even:
        return sizes, signs.long()
    eights, of_eights = sizes.unflatten(1, (-1, 8)), signs.unflatten(1, (-1, 8))
    is_odd = of_eights.sum(-1, keepdim=True) % 2 == 1
    least = torch.zeros_like(of_eights).scatter_(2, eights.argmin(-1, keepdim=True), is_odd)
    turned = torch.where(least, -eights, eights)
    return turned.flatten(1), (of_eights ^ least).flatten(1).long()


def _summed(numbers: Tensor) -> Tensor:
    """Return the sum over the last dimension, added one number after the other."""
    first, *others = numbers.unbind(-1)
    total = first.clone()
    for one in others:
        total += one
    return total


def _inverse(x: Tensor) -> Tensor:
    return x.reciprocal().nan_to_num(0, 0, 0)


def _better(one: _Fit, other: _Fit) -> _Fit:
    """Return `one` in the super-blocks where its error is less, otherwise `other`."""
    is_better = _error(one) < _error(other)

    def chosen(a: Tensor, b: Tensor) -> Tensor:
        mask = is_better.repeat_interleave(a.shape[1] // is_better.shape[1], dim=1)
        return torch.where(mask, a, b)

    return _Fit(
        chosen(one.lines, other.lines), chosen(one.steps, other.steps),
        chosen(one.factor, other.factor), one.along, one.square,
    )  # fmt: skip


def _error(fit: _Fit) -> Tensor:
    """Return a fit's error, (rows, supers), without the constant that all fits share."""
    return fit.factor * (fit.factor * fit.square - 2 * fit.along)

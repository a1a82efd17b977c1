"""Converts words of formats with a grid to codes and scales, and back: the torch reference."""

from functools import cache

import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.kernels import _native
from tandem.kernels.formats.grids import BitField, Grid
from tandem.kernels.formats.weight_format import WeightFormat

_SUPER_COLS = 256
_EIGHTS = _SUPER_COLS // 8


def read_words(fmt: WeightFormat, words: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes (rows, cols) uint8, scales (rows, groups) int8, and fp16 factors or None.

    `words` is (rows, words) int32. A code is a number's index in its grid's magnitudes, with the
    number's sign in the bit above. Factors are None if the words do not hold them.
    """
    grid, supers = _grid(fmt), words.long().unflatten(1, (-1, _grid(fmt).words))
    lines = _numbers(supers, grid.low, _SUPER_COLS // grid.line_cols)
    if grid.high is not None:
        lines = lines | _numbers(supers, grid.high, lines.shape[-1]) << 8
    codes = spread(lines_of(fmt)[lines], grid.line_cols, grid.line_bits)
    signs = spread(_eight_signs(grid, _numbers(supers, grid.signs, _EIGHTS)), 8, 1)
    scales = 2 * _numbers(supers, grid.scales, _groups(fmt)) + 1
    return (
        (codes | signs << grid.sign_bit).to(torch.uint8).flatten(1),
        scales.to(torch.int8).flatten(1),
        None if grid.factor is None else _factors(supers, grid.factor),
    )


def write_words(
    fmt: WeightFormat, codes: Tensor, scales: Tensor, factors: Tensor | None, name: str = "weight"
) -> Tensor:
    """Return the words (rows, words) int32 that hold these codes, scales and factors.

    This is the inverse of `read_words`. Raises `ModelError` with `name` for codes that form no line
    of the grid.
    """
    grid = _grid(fmt)
    stored = codes.long().unflatten(1, (-1, _SUPER_COLS))
    numbers = _joined(stored & ((1 << grid.sign_bit) - 1), grid.line_cols, grid.line_bits)
    lines = _numbers_of_lines(fmt)[numbers]
    eights = _joined(stored >> grid.sign_bit, 8, 1)
    signs = eights & ((1 << grid.signs.width) - 1)
    if bool((lines < 0).any()) or not torch.equal(_eight_signs(grid, signs), eights):
        raise ModelError(
            f"{name} has numbers that are not on the grid of {fmt.name}, expected rows of a file "
            "that has it; choose another format, such as iq4_xs or q3_k"
        )
    words = torch.zeros(*lines.shape[:2], grid.words, dtype=torch.int64, device="cpu")
    _put(words, grid.low, lines & 255)
    if grid.high is not None:
        _put(words, grid.high, lines >> 8)
    _put(words, grid.signs, signs)
    steps = (scales.long().clamp(min=1) - 1) // 2  # rows of padding have scales of 0
    _put(words, grid.scales, steps.unflatten(1, (-1, _groups(fmt))))
    if grid.factor is not None:
        assert factors is not None, "the factor is among the words"
        half = factors.view(torch.int16).long()[..., None]
        shifts = torch.arange(0, 16, 4, device="cpu")
        _put(words, grid.factor, half >> shifts & 15)
    return words.to(torch.int32).flatten(1)


def _grid(fmt: WeightFormat) -> Grid:
    assert fmt.encoding.grid is not None, "a format with a grid"
    return fmt.encoding.grid


def _groups(fmt: WeightFormat) -> int:
    assert fmt.group_size is not None
    return _SUPER_COLS // fmt.group_size


@cache
def lines_of(fmt: WeightFormat) -> Tensor:
    """Return the lines of a format's grid, 16 bits each."""
    return torch.tensor(_native.grid_lines(fmt.encoding.number), device="cpu")


@cache
def _numbers_of_lines(fmt: WeightFormat) -> Tensor:
    """Return a table from the 16 bits of a line to its index; -1 for bits that form no line."""
    numbers = torch.full((1 << 16,), -1, device="cpu")
    lines = lines_of(fmt)
    numbers[lines] = torch.arange(len(lines), device="cpu")
    return numbers


def _places(field: BitField, count: int) -> tuple[Tensor, Tensor]:
    """Return, for each of `count` numbers, the index of its word and its first bit in the word."""
    at = torch.tensor([field.at(number) for number in range(count)], device="cpu")
    return at // 32, at % 32


def _numbers(words: Tensor, field: BitField, count: int) -> Tensor:
    """Return a field's `count` numbers (rows, supers, count) from int64 words (rows, supers, n)."""
    word, bit = _places(field, count)
    return words[..., word] >> bit & ((1 << field.width) - 1)


def _put(words: Tensor, field: BitField, numbers: Tensor) -> None:
    word, bit = _places(field, numbers.shape[-1])
    if field.step == 0:  # four consecutive numbers share one field
        word, bit, numbers = word[::4], bit[::4], numbers[..., ::4]
    words.index_add_(2, word, numbers << bit)


def spread(packed: Tensor, count: int, bits: int) -> Tensor:
    """Unpack numbers of `bits` bits: (rows, supers, n) to (rows, supers, n * count)."""
    shifts = torch.arange(0, count * bits, bits, device="cpu")
    return (packed[..., None] >> shifts & ((1 << bits) - 1)).flatten(2)


def _joined(numbers: Tensor, count: int, bits: int) -> Tensor:
    """Undo `spread`: pack (rows, supers, n * count) numbers to (rows, supers, n)."""
    shifts = torch.arange(0, count * bits, bits, device="cpu")
    joined: Tensor = numbers.unflatten(2, (-1, count)) << shifts
    return joined.sum(-1)


def _eight_signs(grid: Grid, signs: Tensor) -> Tensor:
    """Return one byte for each eight columns, a sign per bit, from the stored sign bits."""
    if grid.signs.width == 1:
        return signs * 255
    if grid.signs.width == 7:
        odd = signs ^ signs >> 4
        odd = odd ^ odd >> 2
        return signs | ((odd ^ odd >> 1) & 1) << 7
    return signs


def _factors(words: Tensor, field: BitField) -> Tensor:
    parts = _joined(_numbers(words, field, 4), 4, 4)[..., 0]
    return parts.to(torch.int16).view(torch.float16)

"""The memory layout of packed matrices: converts row-major words to blocks of 16 rows, and back.

Every format is one transposition: four bytes of a row (2, 4 or 8 columns) make a dword, and a block
holds the first dwords of its 16 rows, then the second ones, and so on. Scales are laid out the same
way. Codes of fewer than 8 bits are split into planes of 4, 2 and 1 bits, in strips of 32 columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels.formats.grid_words import read_words, write_words
from tandem.kernels.formats.weight_format import ROWS_PER_BLOCK, WeightFormat

SCALE_DTYPES = {
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e8m0": torch.uint8,
    "e4m3": torch.uint8,
    "int8": torch.uint8,
    "nibble": torch.uint8,
    "grid": torch.uint8,
}
_BYTES = 0x01010101  # the lowest bit of each byte of a dword
FLOAT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """Weights as codes, row by row: the result of quantising and the input of packing.

    `codes` is (rows, cols): uint8 as the layout stores them (whole numbers with their offset added,
    mxfp4's e2m1 bits, fp8's e4m3 bits), or bfloat16 / float16 for formats without groups.
    `scales` and `minima` are (rows, groups); fp8's scales are repeated for every row. In formats
    with super-blocks they are int8 (nvfp4: e4m3 as uint8), to be multiplied by `super_scales` and
    `super_minima`, fp16 (rows, super-blocks), or fp32 if a super-block is a row.
    """

    codes: Tensor
    scales: Tensor | None = None
    minima: Tensor | None = None
    super_scales: Tensor | None = None
    super_minima: Tensor | None = None

    def rows(self, chosen: slice | Tensor) -> "CodedMatrix":
        """Return the chosen rows; a slice gives views."""
        return self.with_each(lambda part: part[chosen])

    def with_each(self, change: Callable[[Tensor], Tensor]) -> "CodedMatrix":
        """Return the matrix with `change` applied to each of its tensors."""
        changed = (None if part is None else change(part) for part in self.parts[1:])
        return CodedMatrix(change(self.codes), *changed)

    @classmethod
    def stacked(cls, matrices: Sequence["CodedMatrix"]) -> "CodedMatrix":
        """Return the rows of several matrices of one format, stacked."""
        first, *others = matrices
        if not others:
            return first
        codes, *lines = (
            None if parts[0] is None else torch.cat(parts)
            for parts in zip(*(matrix.parts for matrix in matrices), strict=True)
        )
        assert codes is not None, "every matrix has codes"
        return cls(codes, *lines)

    @property
    def parts(self) -> tuple[Tensor | None, ...]:
        """The five tensors, the codes first; None for a tensor that the format lacks."""
        return (self.codes, self.scales, self.minima, self.super_scales, self.super_minima)


@dataclass(frozen=True, slots=True)
class MatrixBlocks:
    """Views of a packed matrix's memory, block by block.

    `words` is (blocks, dwords per row, 16) int32. `scales` is (blocks, groups, 16), for int4z
    (blocks, 2 * groups, 16) with scales at even and minima at odd indices, for fp8
    (blocks, groups, 1); with super-blocks it is (blocks, super-blocks, bytes) uint8.
    """

    words: Tensor
    scales: Tensor | None

    @classmethod
    def over(
        cls, fmt: WeightFormat, rows: int, cols: int, data: Tensor, scales: Tensor | None
    ) -> "MatrixBlocks":
        """View flat `data` (uint8) and `scales` (uint8 or the scales' dtype) as blocks."""
        blocks = fmt.padded_rows(rows) // ROWS_PER_BLOCK
        words = data.view(torch.int32).view(blocks, fmt.dwords(cols), ROWS_PER_BLOCK)
        encoding = fmt.encoding
        if scales is None or fmt.group_size is None or encoding.scale is None:
            return cls(words, None)
        if encoding.super_cols:
            super_bytes = fmt.scale_bytes(ROWS_PER_BLOCK, cols) // fmt.supers(cols)
            shape = (blocks, fmt.supers(cols), super_bytes)
            return cls(words, scales.view(torch.uint8).view(shape))
        num_scales = ROWS_PER_BLOCK // encoding.rows_per_scale
        lines = fmt.padded_cols(cols) // fmt.group_size * encoding.lines
        return cls(words, scales.view(SCALE_DTYPES[encoding.scale]).view(blocks, lines, num_scales))

    def every_nth(self, step: int, first: int) -> "MatrixBlocks":
        """Return a view of every `step`-th block, from `first` on."""
        chosen = slice(first, None, step)
        return MatrixBlocks(
            self.words[chosen], None if self.scales is None else self.scales[chosen]
        )

    def write(self, fmt: WeightFormat, first_block: int, coded: CodedMatrix) -> None:
        """Write rows, which must fill whole blocks and groups, from block `first_block` on."""
        stop = first_block + coded.codes.shape[0] // ROWS_PER_BLOCK
        if fmt.encoding.grid is not None:
            self._write_lines(fmt, slice(first_block, stop), coded)
            return
        self.words[first_block:stop] = _to_blocks(_to_words(fmt, coded.codes))
        if self.scales is None or coded.scales is None:
            return
        target = self.scales[first_block:stop]
        if fmt.encoding.super_cols:
            _SuperLines.over(fmt, target).write(coded)
        elif coded.minima is None:
            target.copy_(_to_blocks(coded.scales)[:, :, :: fmt.encoding.rows_per_scale])
        else:
            target[:, 0::2] = _to_blocks(coded.scales)
            target[:, 1::2] = _to_blocks(coded.minima)

    def read(self, fmt: WeightFormat) -> CodedMatrix:
        """Return all rows in order, padding included."""
        if fmt.encoding.grid is not None:
            codes, own, factors = read_words(fmt, _from_blocks(self.words))
            return CodedMatrix(codes, own, None, self._factors() if factors is None else factors)
        codes = _from_words(fmt, _from_blocks(self.words))
        if self.scales is None:
            return CodedMatrix(codes)
        if fmt.encoding.super_cols:
            return _SuperLines.over(fmt, self.scales).read(codes)
        if fmt.encoding.has_minima:
            even, odd = self.scales[:, 0::2], self.scales[:, 1::2]
            return CodedMatrix(codes, _from_blocks(even), _from_blocks(odd))
        of_rows = self.scales.expand(-1, -1, ROWS_PER_BLOCK)
        return CodedMatrix(codes, _from_blocks(of_rows))

    def _write_lines(self, fmt: WeightFormat, chosen: slice, coded: CodedMatrix) -> None:
        assert coded.scales is not None
        assert coded.super_scales is not None
        words = write_words(fmt, coded.codes, coded.scales, coded.super_scales)
        self.words[chosen] = _to_blocks(words)
        if self.scales is not None and fmt.encoding.super_bytes:
            self.scales[chosen].view(torch.float16).copy_(_to_blocks(coded.super_scales))

    def _factors(self) -> Tensor:
        """Return the super-blocks' factors, row by row; `scales` must hold nothing else."""
        assert self.scales is not None
        return _from_blocks(self.scales.view(torch.float16))


@dataclass(frozen=True, slots=True)
class _SuperLines:
    """Views of the memory of super-blocks' scales: the factors, and the bytes of the groups.

    `supers` is (blocks, super-blocks, lines, 16) fp16 or fp32, `groups` (blocks, super-blocks,
    groups, lines, 16); line 0 has the scales, line 1 the minima. Nibbles have one line: a byte has
    a scale in the low nibble and its minimum in the high nibble.
    """

    supers: Tensor
    groups: Tensor
    are_nibbles: bool

    @classmethod
    def over(cls, fmt: WeightFormat, scales: Tensor) -> "_SuperLines":
        encoding = fmt.encoding
        are_nibbles, lines = encoding.scale == "nibble", encoding.lines
        first = encoding.super_bytes * ROWS_PER_BLOCK
        factors = scales[..., :first].view(SCALE_DTYPES[encoding.factor])
        groups = scales[..., first:].view(torch.int8 if encoding.scale == "int8" else torch.uint8)
        of_group = (-1, 1 if are_nibbles else lines, ROWS_PER_BLOCK)
        return cls(
            factors.unflatten(-1, (lines, ROWS_PER_BLOCK)),
            groups.unflatten(-1, of_group),
            are_nibbles,
        )

    def write(self, coded: CodedMatrix) -> None:
        for line, factors in enumerate((coded.super_scales, coded.super_minima)):
            if factors is not None:
                self.supers[:, :, line] = _to_blocks(factors)
        own = [part for part in (coded.scales, coded.minima) if part is not None]
        if self.are_nibbles:
            own = [own[0].to(torch.uint8) | own[1].to(torch.uint8) << 4]
        for line, part in enumerate(own):
            self.groups[:, :, :, line] = _to_blocks(part).unflatten(1, self.groups.shape[1:3])

    def read(self, codes: Tensor) -> CodedMatrix:
        own = [_from_blocks(part.flatten(1, 2)) for part in self.groups.unbind(3)]
        if self.are_nibbles:
            own = [(own[0] & 15).view(torch.int8), (own[0] >> 4).view(torch.int8)]
        factors = [_from_blocks(part) for part in self.supers.unbind(2)]
        if len(own) == 1:
            return CodedMatrix(codes, own[0], None, factors[0])
        return CodedMatrix(codes, own[0], own[1], factors[0], factors[1])


def _to_blocks(row_major: Tensor) -> Tensor:
    """View (16 * blocks, n) as (blocks, n, 16)."""
    by_block: Tensor = row_major.unflatten(0, (-1, ROWS_PER_BLOCK))  # (blocks, 16, n)
    return by_block.transpose(1, 2)


def _from_blocks(blocks: Tensor) -> Tensor:
    """Copy (blocks, n, 16) to (16 * blocks, n)."""
    return blocks.transpose(1, 2).flatten(0, 1)


def _to_words(fmt: WeightFormat, codes: Tensor) -> Tensor:
    """Join the codes of each row into dwords: (rows, cols) -> (rows, dwords) int32."""
    words = codes.contiguous().view(torch.int32)
    if fmt.bits >= 8:
        return words
    fours: Tensor = words.unflatten(1, (-1, 8))  # (rows, strips, 8), four columns each
    planes, done = [], 0
    for width in fmt.encoding.planes:
        bits = (fours >> done) & (_BYTES * ((1 << width) - 1))
        lines = bits.unflatten(2, (-1, 8 // width))
        plane = lines[..., 0]
        for place in range(1, 8 // width):
            plane = plane | (lines[..., place] << width * place)
        planes.append(plane)
        done += width
    return torch.cat(planes, dim=2).flatten(1)


def _from_words(fmt: WeightFormat, words: Tensor) -> Tensor:
    """Undo `_to_words`: (rows, dwords) int32 -> (rows, cols) of the codes' dtype."""
    if fmt.bits == 16:
        return words.contiguous().view(FLOAT_DTYPES[fmt.encoding.element])
    if fmt.bits == 8:
        return words.contiguous().view(torch.uint8)
    widths = fmt.encoding.planes
    strips: Tensor = words.unflatten(1, (-1, fmt.bits))  # each plane has `width` dwords per strip
    fours, done = torch.zeros_like(strips[..., :1]), 0
    for width, plane in zip(widths, strips.split(widths, dim=2), strict=True):
        places = [(plane >> width * place) for place in range(8 // width)]
        bits = torch.stack(places, dim=3).flatten(2) & (_BYTES * ((1 << width) - 1))
        fours = fours | (bits << done)
        done += width
    return fours.flatten(1).contiguous().view(torch.uint8)

"""Where each byte lies: row-major words to blocks of 16 rows and back. Knows no numbers.

Every format is one transposition: four bytes of one row (2, 4 or 8 columns) make a dword, and a
block holds its 16 rows' first dwords, then their second ones, and so on. Scales go the same way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels.formats.weight_format import ROWS_PER_BLOCK, WeightFormat

SCALE_DTYPES = {"fp16": torch.float16, "fp32": torch.float32, "e8m0": torch.uint8}
FLOAT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """Weights as codes, row by row: what quantising gives and what packing places.

    `codes` is (rows, cols): uint8 as the layout stores them (int4 and int8 with their offsets 8 and
    128 added, mxfp4's e2m1 bits, fp8's e4m3 bits), or bfloat16 / float16 for formats without
    groups. `scales` and `minima` are (rows, groups); fp8's scales are repeated for every row.
    """

    codes: Tensor
    scales: Tensor | None = None
    minima: Tensor | None = None

    def rows(self, chosen: slice) -> "CodedMatrix":
        """Return views of some rows."""
        return CodedMatrix(
            self.codes[chosen],
            None if self.scales is None else self.scales[chosen],
            None if self.minima is None else self.minima[chosen],
        )


@dataclass(frozen=True, slots=True)
class MatrixBlocks:
    """Views of a packed matrix's memory, block by block.

    `words` is (blocks, dwords per row, 16) int32. `scales` is (blocks, groups, 16), for int4z
    (blocks, 2 * groups, 16) with scales at even and minima at odd indices, for fp8
    (blocks, groups, 1).
    """

    words: Tensor
    scales: Tensor | None

    @classmethod
    def over(
        cls, fmt: WeightFormat, rows: int, cols: int, data: Tensor, scales: Tensor | None
    ) -> "MatrixBlocks":
        """View flat `data` (uint8) and `scales` (uint8 or the scales' dtype) as blocks."""
        blocks = fmt.padded_rows(rows) // ROWS_PER_BLOCK
        dwords = fmt.padded_cols(cols) // fmt.weights_per_dword
        words = data.view(torch.int32).view(blocks, dwords, ROWS_PER_BLOCK)
        encoding = fmt.encoding
        if scales is None or fmt.group_size is None or encoding.scale is None:
            return cls(words, None)
        lanes = ROWS_PER_BLOCK // encoding.rows_per_scale
        lines = fmt.padded_cols(cols) // fmt.group_size * (2 if encoding.has_minima else 1)
        return cls(words, scales.view(SCALE_DTYPES[encoding.scale]).view(blocks, lines, lanes))

    def every_nth(self, step: int, first: int) -> "MatrixBlocks":
        """Return views of every `step`-th block."""
        chosen = slice(first, None, step)
        return MatrixBlocks(
            self.words[chosen], None if self.scales is None else self.scales[chosen]
        )

    def write(self, fmt: WeightFormat, first_block: int, coded: CodedMatrix) -> None:
        """Place rows that fill whole blocks and whole groups, from a block on."""
        stop = first_block + coded.codes.shape[0] // ROWS_PER_BLOCK
        self.words[first_block:stop] = _to_blocks(_to_words(fmt, coded.codes))
        if self.scales is None or coded.scales is None:
            return
        target = self.scales[first_block:stop]
        if coded.minima is None:
            target.copy_(_to_blocks(coded.scales)[:, :, :: fmt.encoding.rows_per_scale])
        else:
            target[:, 0::2] = _to_blocks(coded.scales)
            target[:, 1::2] = _to_blocks(coded.minima)

    def read(self, fmt: WeightFormat) -> CodedMatrix:
        """Return all rows in order, padding included."""
        codes = _from_words(fmt, _from_blocks(self.words))
        if self.scales is None:
            return CodedMatrix(codes)
        if fmt.encoding.has_minima:
            even, odd = self.scales[:, 0::2], self.scales[:, 1::2]
            return CodedMatrix(codes, _from_blocks(even), _from_blocks(odd))
        of_rows = self.scales.expand(-1, -1, ROWS_PER_BLOCK)
        return CodedMatrix(codes, _from_blocks(of_rows))


def _to_blocks(row_major: Tensor) -> Tensor:
    """Turn (16 * blocks, n) into a view (blocks, n, 16)."""
    by_block: Tensor = row_major.unflatten(0, (-1, ROWS_PER_BLOCK))  # (blocks, 16, n)
    return by_block.transpose(1, 2)


def _from_blocks(blocks: Tensor) -> Tensor:
    """Turn (blocks, n, 16) into a copy (16 * blocks, n)."""
    return blocks.transpose(1, 2).flatten(0, 1)


def _to_words(fmt: WeightFormat, codes: Tensor) -> Tensor:
    """Join the codes of each row into dwords: (rows, cols) -> (rows, dwords) int32."""
    words = codes.contiguous().view(torch.int32)
    if fmt.bits != 4:
        return words
    first: Tensor = words[:, 0::2]  # columns 0..3 of each chunk
    return first | (words[:, 1::2] << 4)


def _from_words(fmt: WeightFormat, words: Tensor) -> Tensor:
    """Undo `_to_words`: (rows, dwords) int32 -> (rows, cols) of the codes' dtype."""
    if fmt.bits == 16:
        return words.contiguous().view(FLOAT_DTYPES[fmt.encoding.element])
    if fmt.bits == 4:
        words = torch.stack((words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F), dim=2).flatten(1)
    return words.contiguous().view(torch.uint8)

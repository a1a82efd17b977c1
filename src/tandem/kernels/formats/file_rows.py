"""Rearranges rows that are already quantised in a file into packed matrices, natively."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.kernels import _native
from tandem.kernels.formats.blocks import MatrixBlocks
from tandem.kernels.formats.source_codes import FP8_BLOCK_ROWS
from tandem.kernels.formats.weight_format import WeightFormat

_NUMBER_DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileBlocks:
    """A matrix's rows of ggml blocks in a mapped file: (rows, bytes) uint8, contiguous.

    `kind` is ggml's number of the blocks' type. `order` (rows,) int64 has each row's index in the
    file; None keeps the file's order. `table` maps each of 256 codes to the format's code; None
    keeps the codes. `factor` (fp32) multiplies the values of a format with factors per row; None
    means 1.
    """

    rows: npt.NDArray[np.uint8]
    kind: int
    order: Tensor | None = None
    table: Tensor | None = None
    factor: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the matrix."""
        return len(self.rows)

    @property
    def num_cols(self) -> int:
        """Columns of the matrix."""
        row_bytes: int = self.rows.shape[1]
        blocks, rest = divmod(row_bytes, _native.block_bytes(self.kind))
        if rest:
            raise ValueError(
                f"rows of {row_bytes} bytes, expected whole blocks of kind {self.kind}"
            )
        return blocks * _native.block_cols(self.kind)

    def extents(self) -> list[tuple[int, int]]:
        """Return (address, bytes) of the memory that is read."""
        return [(self.rows.ctypes.data, self.rows.nbytes)]

    def rows_at(self, chosen: slice) -> "FileBlocks":
        """Return a contiguous range of rows; `ValueError` if `order` is set."""
        if self.order is not None:
            raise ValueError("rows in another order, expected those of the file")
        return replace(self, rows=self.rows[chosen])


@dataclass(frozen=True, slots=True)
class FileFields:
    """Codes of a (rows, cols) matrix in words of 32 bits, lowest bits first, and their scales.

    `words` is (rows, words) int32, or its bytes, of any strides. Where eight rows share a word,
    `words` is (rows / 8, cols), and `places` has a nibble per row: the row's field in the word. The
    codes must have the format's width. `flip` is a mask of the bits to invert in each code.
    `scales` and `minima` are (rows, groups), for fp8 (rows / 128, groups), rounded up; both may be
    expanded views. A group of the file may cover several groups of the format. `factor` is as in
    `FileBlocks`.
    """

    words: Tensor
    shape: tuple[int, ...]
    scales: Tensor
    minima: Tensor | None = None
    places: int = 0
    flip: int = 0
    factor: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the matrix."""
        return self.shape[0]

    @property
    def num_cols(self) -> int:
        """Columns of the matrix."""
        return self.shape[1]

    def extents(self) -> list[tuple[int, int]]:
        """Return (address, bytes) of each tensor's memory, including gaps between its values."""
        parts = (part for part in (self.words, self.scales, self.minima) if part is not None)
        return [(part.data_ptr(), _span(part)) for part in parts]

    def fit(self, fmt: WeightFormat) -> bool:
        """Tell whether rows are whole words, and scales have a dtype that converts to `fmt`'s."""
        has_bytes = fmt.encoding.scale in ("e8m0", "e4m3")
        numbers = [self.scales] if self.minima is None else [self.scales, self.minima]
        return self.num_cols * fmt.bits % 32 == 0 and all(
            part.dtype in _NUMBER_DTYPES and (part.element_size() == 1) == has_bytes
            for part in numbers
        )

    def rows_at(self, chosen: slice) -> "FileFields":
        """Return the chosen rows; `ValueError` if several rows share a word or a scale."""
        if self.places or len(self.scales) != self.num_rows:
            raise ValueError("rows that share words or scales, expected some for each")
        words, minima = self.words[chosen], self.minima
        return replace(
            self, words=words, shape=(len(words), self.num_cols), scales=self.scales[chosen],
            minima=None if minima is None else minima[chosen],
        )  # fmt: skip


FileRows = FileBlocks | FileFields


class Placing(NamedTuple):
    """Rows of a file, and the blocks of a packed matrix that they fill."""

    blocks: MatrixBlocks
    format: WeightFormat
    source: FileRows
    name: str = "weight"


def write_file_rows(placings: Sequence[Placing]) -> None:
    """Write rows into matrices; `ModelError` names the first matrix with a non-finite scale.

    For `FileFields`, the error also occurs for a scale or an e4m3 code that the format does not
    hold exactly. Uses as many threads as torch, without the GIL; mapped files are read ahead.
    """
    if _place(placings):
        return
    damaged = next(placing for placing in placings if not _place([placing]))
    raise ModelError(
        f"{damaged.name}'s scales hold NaN or infinity, expected finite numbers; the checkpoint is "
        "damaged: download or convert it again"
    )


def _place(placings: Sequence[Placing]) -> bool:
    blocks: list[tuple[_native.PackedPlace, _native.BlockRows]] = []
    fields: list[tuple[_native.PackedPlace, _native.FieldRows]] = []
    for target, fmt, source, _ in placings:
        rows, cols = source.num_rows, source.num_cols
        if fmt.encoding.scale is None:
            raise ValueError(f"rows of a file for {fmt.name}, expected a format with scales")
        scales = target.words[..., :0] if target.scales is None else target.scales
        place = fmt.encoding.number, rows, cols, target.words, scales, source.factor
        if isinstance(source, FileFields):
            fields.append((place, _fields(source, fmt)))
        else:
            blocks.append((place, (source.kind, source.rows, source.order, source.table)))
    return _native.rearrange_rows(torch.get_num_threads(), blocks, fields)


def _fields(source: FileFields, fmt: WeightFormat) -> "_native.FieldRows":
    group = fmt.group_size or source.num_cols
    groups = -(-source.num_cols // group)
    scale_rows = FP8_BLOCK_ROWS if fmt.encoding.element == "e4m3" else 1
    return (
        source.words, source.places, source.flip, group, -(-groups // source.scales.shape[1]),
        scale_rows, source.scales, source.minima,
    )  # fmt: skip


def _span(view: Tensor) -> int:
    """Return the bytes from a view's first number to the end of its last number."""
    steps = ((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return (sum(steps) + 1) * view.element_size()

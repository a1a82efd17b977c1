"""Blocks of 32 or 256 numbers as GGUF files have them, rearranged natively into packed matrices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.kernels import _native
from tandem.kernels.formats.blocks import MatrixBlocks
from tandem.kernels.formats.weight_format import WeightFormat


@dataclass(frozen=True, slots=True)
class FileBlocks:
    """Rows of blocks: (rows, bytes) uint8, contiguous, where they lie in a mapped file.

    `order` (rows,) int64 says which row of the source each row is; None: the same.
    """

    rows: npt.NDArray[np.uint8]
    order: Tensor | None = None

    def in_halves(self) -> "tuple[FileBlocks, FileBlocks]":
        """Return the first and the second half of the rows, which are in order."""
        assert self.order is None
        half = len(self.rows) // 2
        return FileBlocks(self.rows[:half]), FileBlocks(self.rows[half:])


def has_file_blocks(fmt: WeightFormat) -> bool:
    """Whether a format's blocks in files can be rearranged natively."""
    number = fmt.encoding.number
    is_of_blocks = fmt.encoding.super_cols > 0 or fmt.group_size == _native.block_cols(number)
    return is_of_blocks and _native.block_bytes(number) > 0


class Placing(NamedTuple):
    """Rows of blocks, and blocks of a packed matrix that have room for just them."""

    blocks: MatrixBlocks
    format: WeightFormat
    source: FileBlocks
    name: str = "weight"


def write_file_blocks(placings: Sequence[Placing]) -> None:
    """Place rows into matrices; `ModelError` names the first with a scale that is not finite.

    Works with as many threads as torch does, without Python's lock; mapped files are read ahead.
    """
    if _place(placings):
        return
    damaged = next(placing for placing in placings if not _place([placing]))
    raise ModelError(
        f"{damaged.name}'s scales hold NaN or infinity, expected finite numbers; the checkpoint is "
        "damaged: download or convert it again"
    )


def _place(placings: Sequence[Placing]) -> bool:
    calls = torch.tensor([_call(placing) for placing in placings], dtype=torch.int64, device="cpu")
    return _native.rearrange_blocks(torch.get_num_threads(), len(calls), calls.data_ptr())


def _call(placing: Placing) -> tuple[int, ...]:
    """Return what csrc/bindings_dense.cpp reads of one."""
    blocks, fmt, source, _ = placing
    rows, row_bytes = source.rows.shape
    assert source.rows.flags.c_contiguous
    count, rest = divmod(row_bytes, _native.block_bytes(fmt.encoding.number))
    cols = count * _native.block_cols(fmt.encoding.number)
    assert rest == 0
    assert blocks.scales is not None
    assert blocks.words.shape[:2] == (fmt.padded_rows(rows) // 16, fmt.dwords(cols))
    return (
        fmt.encoding.number, source.rows.ctypes.data,
        0 if source.order is None else source.order.data_ptr(), rows, cols,
        blocks.words.data_ptr(), blocks.scales.data_ptr(),
        blocks.words.stride(0) * blocks.words.element_size(),
        blocks.scales.stride(0) * blocks.scales.element_size(),
    )  # fmt: skip

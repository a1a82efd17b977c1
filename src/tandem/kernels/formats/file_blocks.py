"""Blocks of 256 numbers as GGUF files have them, rearranged natively into packed matrices."""

from dataclasses import dataclass

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


def has_file_blocks(fmt: WeightFormat) -> bool:
    """Whether a format's blocks in files can be rearranged natively."""
    return _native.block_bytes(fmt.encoding.number) > 0


def write_file_blocks(
    blocks: MatrixBlocks, fmt: WeightFormat, source: FileBlocks, *, name: str = "weight"
) -> None:
    """Place rows into blocks that have room for just them; `ModelError` for a scale of NaN.

    Works with as many threads as torch does, without Python's lock.
    """
    rows, row_bytes = source.rows.shape
    assert source.rows.flags.c_contiguous
    supers, rest = divmod(row_bytes, _native.block_bytes(fmt.encoding.number))
    cols = supers * fmt.encoding.super_cols
    assert rest == 0
    assert blocks.scales is not None
    assert blocks.words.shape[:2] == (fmt.padded_rows(rows) // 16, fmt.dwords(cols))
    is_whole = _native.rearrange_blocks(
        torch.get_num_threads(),
        fmt.encoding.number,
        source.rows.ctypes.data,
        0 if source.order is None else source.order.data_ptr(),
        rows,
        cols,
        blocks.words.data_ptr(),
        blocks.words.stride(0) * blocks.words.element_size(),
        blocks.scales.data_ptr(),
        blocks.scales.stride(0),
    )
    if not is_whole:
        raise ModelError(
            f"{name}'s scales hold NaN or infinity, expected finite numbers; the checkpoint is "
            "damaged: download or convert it again"
        )

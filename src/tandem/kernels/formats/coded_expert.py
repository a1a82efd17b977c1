"""Writes an expert whose matrices are quantised already, and reorders its rows in place."""

import torch
from torch import Tensor

from tandem.kernels.formats.blocks import CodedMatrix
from tandem.kernels.formats.expert import ExpertLayout, half_rows
from tandem.kernels.formats.packed import write_codes


def pack_coded_up(
    layout: ExpertLayout, up: CodedMatrix, *, is_interleaved: bool, out: Tensor
) -> None:
    """Write the first projection's codes (up rows, hidden_size)."""
    for half in range(layout.num_halves):
        rows = up.rows(half_rows(layout, half, is_interleaved))
        write_codes(layout.up_half(out, half), layout.format, rows, name="the first projection")


def pack_coded_down(layout: ExpertLayout, down: CodedMatrix, *, out: Tensor) -> None:
    """Write the second projection's codes (hidden_size, intermediate_size)."""
    write_codes(layout.down_blocks(out), layout.down_format, down, name="the second projection")


def order_inner_rows(layout: ExpertLayout, buffer: Tensor, order: Tensor) -> None:
    """Put row `order[i]` of the first projection (of each of its halves) at row i."""
    for half in range(layout.num_halves):
        blocks = layout.up_half(buffer, half)
        coded = blocks.read(layout.format)  # a copy, padding included
        rows = torch.arange(coded.codes.shape[0], device="cpu")
        rows[: len(order)] = order
        blocks.write(layout.format, 0, coded.rows(rows))

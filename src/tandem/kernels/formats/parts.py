"""Writes an expert part by part, in the order in which a checkpoint brings them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.kernels.formats.expert import ExpertLayout, half_rows, require_bias, write_bias
from tandem.kernels.formats.packed import write_weight


def pack_up(layout: ExpertLayout, up: Tensor, *, is_interleaved: bool, out: Tensor) -> None:
    """Write the first projection (up rows, hidden_size), not transposed, into a zeroed buffer."""
    halves = range(layout.num_halves)
    pack_halves(layout, [up[half_rows(layout, half, is_interleaved)] for half in halves], out=out)


def pack_halves(layout: ExpertLayout, halves: Sequence[Tensor], *, out: Tensor) -> None:
    """Write the halves of the first projection, each (inner rows, hidden_size), as `pack_up`."""
    for half, rows in enumerate(halves):
        write_weight(layout.up_half(out, half), layout.format, rows, name="the first projection")


def pack_down(layout: ExpertLayout, down: Tensor, *, out: Tensor) -> None:
    """Write the second projection (hidden_size, intermediate_size), not transposed."""
    write_weight(layout.down_blocks(out), layout.down_format, down, name="the second projection")


def pack_up_bias(layout: ExpertLayout, bias: Tensor, *, is_interleaved: bool, out: Tensor) -> None:
    """Write the bias of the first projection, which follows its rows."""
    require_bias(bias, layout, "the first projection")
    for half in range(layout.num_halves):
        write_bias(layout.up_bias_half(out, half), bias[half_rows(layout, half, is_interleaved)])


def pack_down_bias(layout: ExpertLayout, bias: Tensor, *, out: Tensor) -> None:
    """Write the bias of the second projection."""
    require_bias(bias, layout, "the second projection")
    layout.down_bias.of(out).view(torch.float32)[: layout.hidden_size] = bias

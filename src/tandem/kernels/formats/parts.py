"""An expert's parts, in the order in which a checkpoint brings them, and where each is written."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.kernels.formats.expert import ExpertLayout, half_rows, require_bias, write_bias
from tandem.kernels.formats.native_quantize import Rounding


def halves_of(layout: ExpertLayout, up: Tensor, *, is_interleaved: bool) -> list[Tensor]:
    """Return the halves of the first projection (up rows, hidden_size), not transposed."""
    return [up[half_rows(layout, half, is_interleaved)] for half in range(layout.num_halves)]


def round_up(
    layout: ExpertLayout, halves: Sequence[Tensor], *, out: Tensor, name: str
) -> list[Rounding]:
    """Say where the first projection's halves, (inner rows, hidden_size), go in a zeroed buffer."""
    name = f"{name}: the first projection"
    return [
        Rounding(layout.up_half(out, half), layout.format, rows, name)
        for half, rows in enumerate(halves)
    ]


def round_down(layout: ExpertLayout, down: Tensor, *, out: Tensor, name: str) -> list[Rounding]:
    """Say where the second projection (hidden_size, intermediate_size) goes, not transposed."""
    blocks = layout.down_blocks(out)
    return [Rounding(blocks, layout.down_format, down, f"{name}: the second projection")]


def pack_up_bias(
    layout: ExpertLayout, bias: Tensor, *, is_interleaved: bool, out: Tensor, name: str
) -> None:
    """Write the bias of the first projection, which follows its rows."""
    require_bias(bias, layout, f"{name}: the first projection")
    for half in range(layout.num_halves):
        write_bias(layout.up_bias_half(out, half), bias[half_rows(layout, half, is_interleaved)])


def pack_down_bias(layout: ExpertLayout, bias: Tensor, *, out: Tensor, name: str) -> None:
    """Write the bias of the second projection."""
    require_bias(bias, layout, f"{name}: the second projection")
    layout.down_bias.of(out).view(torch.float32)[: layout.hidden_size] = bias

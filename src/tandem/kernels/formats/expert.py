"""One expert as one contiguous buffer, so that a fetch is one copy."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.kernels.formats.blocks import MatrixBlocks
from tandem.kernels.formats.packed import decode, write_weight
from tandem.kernels.formats.weight_format import (
    ROWS_PER_BLOCK,
    SECTION_ALIGNMENT_BYTES,
    WeightFormat,
)
from tandem.kernels.reference import ExpertWeights


@dataclass(frozen=True, slots=True)
class Section:
    """Bytes of an expert's buffer that belong together; absent ones are 0 long."""

    offset: int
    num_bytes: int

    def of(self, buffer: Tensor) -> Tensor:
        """Return the section's bytes as a view of an expert's buffer."""
        return buffer[self.offset : self.offset + self.num_bytes]


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Where the parts of an expert lie in its buffer; the same for all experts of a layer."""

    format: WeightFormat
    hidden_size: int
    intermediate_size: int
    is_gated: bool
    has_bias: bool
    up: Section = field(init=False)
    up_scales: Section = field(init=False)
    down: Section = field(init=False)
    down_scales: Section = field(init=False)
    up_bias: Section = field(init=False)
    down_bias: Section = field(init=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        fmt, (rows, cols) = self.format, (self.hidden_size, self.intermediate_size)
        sizes = {
            "up": fmt.data_bytes(self.up_rows, rows),
            "up_scales": fmt.scale_bytes(self.up_rows, rows),
            "down": fmt.data_bytes(rows, cols),
            "down_scales": fmt.scale_bytes(rows, cols),
            "up_bias": 4 * self.up_rows * self.has_bias,
            "down_bias": 4 * fmt.padded_rows(rows) * self.has_bias,
        }
        offset = 0
        for name, size in sizes.items():
            object.__setattr__(self, name, Section(offset, size))
            offset += -(-size // SECTION_ALIGNMENT_BYTES) * SECTION_ALIGNMENT_BYTES
        object.__setattr__(self, "num_bytes", offset)

    @property
    def up_rows(self) -> int:
        """Rows of the up matrix: the padded intermediate size, twice that if gated."""
        return (1 + self.is_gated) * self.format.padded_rows(self.intermediate_size)

    def up_blocks(self, buffer: Tensor) -> MatrixBlocks:
        """View the up matrix of an expert's buffer block by block."""
        data, scales = self.up.of(buffer), self.up_scales.of(buffer)
        return MatrixBlocks.over(self.format, self.up_rows, self.hidden_size, data, scales)

    def down_blocks(self, buffer: Tensor) -> MatrixBlocks:
        """View the down matrix of an expert's buffer block by block."""
        data, scales = self.down.of(buffer), self.down_scales.of(buffer)
        return MatrixBlocks.over(
            self.format, self.hidden_size, self.intermediate_size, data, scales
        )


def pack_expert(
    layout: ExpertLayout,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    is_transposed: bool = False,
    is_interleaved: bool = False,
    out: Tensor,
) -> None:
    """Write an expert into `out`, (layout.num_bytes,) uint8.

    `up` is (up rows, hidden_size) and `down` (hidden_size, intermediate_size), both the other way
    round if `is_transposed`. Of gated experts `up` holds [gate; up], or gate in the even and up in
    the odd rows if `is_interleaved`; `up_bias` follows the rows of `up`.
    """
    if is_transposed:
        up, down = up.T, down.T
    out.zero_()
    pack_up(layout, up, is_interleaved=is_interleaved, out=out)
    pack_down(layout, down, out=out)
    if up_bias is not None:
        pack_bias(layout, up_bias, is_up=True, is_interleaved=is_interleaved, out=out)
    if down_bias is not None:
        pack_bias(layout, down_bias, is_up=False, out=out)


def pack_up(layout: ExpertLayout, up: Tensor, *, is_interleaved: bool = False, out: Tensor) -> None:
    """Write the first projection (up rows, hidden_size), not transposed, into an expert's buffer."""
    for half, target in _halves(layout, layout.up_blocks(out)):
        rows = _half_rows(layout, half, is_interleaved)
        write_weight(target, layout.format, up[rows], name="up")


def pack_down(layout: ExpertLayout, down: Tensor, *, out: Tensor) -> None:
    """Write the second projection (hidden_size, intermediate_size) into an expert's buffer."""
    write_weight(layout.down_blocks(out), layout.format, down, name="down")


def pack_bias(
    layout: ExpertLayout, bias: Tensor, *, is_up: bool, is_interleaved: bool = False, out: Tensor
) -> None:
    """Write a bias in fp32 into an expert's zeroed buffer; the first one follows the rows of `up`."""
    if not is_up:
        layout.down_bias.of(out).view(torch.float32)[: layout.hidden_size] = bias
        return
    step = 1 + layout.is_gated
    lanes = layout.up_bias.of(out).view(torch.float32).view(-1, ROWS_PER_BLOCK)
    for half in range(step):
        padded = torch.zeros(lanes[half::step].shape)
        padded.view(-1)[: layout.intermediate_size] = bias[_half_rows(layout, half, is_interleaved)]
        lanes[half::step] = padded


def _halves(layout: ExpertLayout, blocks: MatrixBlocks) -> list[tuple[int, MatrixBlocks]]:
    if not layout.is_gated:
        return [(0, blocks)]
    return [(half, blocks.every_second(half)) for half in (0, 1)]


def _half_rows(layout: ExpertLayout, half: int, is_interleaved: bool) -> slice:
    size = layout.intermediate_size
    if not layout.is_gated:
        return slice(0, size)
    return slice(half, None, 2) if is_interleaved else slice(half * size, (half + 1) * size)


def unpack_expert(layout: ExpertLayout, buffer: Tensor) -> ExpertWeights:
    """Return an expert's values in fp32: `up` as [gate; up], nothing transposed."""
    fmt, size = layout.format, layout.intermediate_size
    halves = [
        decode(target.read(fmt), fmt)[:size, : layout.hidden_size]
        for _, target in _halves(layout, layout.up_blocks(buffer))
    ]
    down = decode(layout.down_blocks(buffer).read(fmt), fmt)[: layout.hidden_size, :size]
    up_bias = down_bias = None
    if layout.has_bias:
        lanes = layout.up_bias.of(buffer).view(torch.float32).view(-1, ROWS_PER_BLOCK)
        step = 1 + layout.is_gated
        up_bias = torch.cat([lanes[half::step].flatten()[:size] for half in range(step)])
        down_bias = layout.down_bias.of(buffer).view(torch.float32)[: layout.hidden_size].clone()
    return ExpertWeights(torch.cat(halves), down.contiguous(), up_bias, down_bias)

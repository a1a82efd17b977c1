"""One expert as one contiguous buffer, so that a fetch is a single copy.

The parts of the buffer are written separately.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.kernels.formats.blocks import CodedMatrix, MatrixBlocks
from tandem.kernels.formats.codes import decode
from tandem.kernels.formats.native_quantize import Rounding
from tandem.kernels.formats.packed import write_codes
from tandem.kernels.formats.weight_format import (
    ROWS_PER_BLOCK,
    WeightFormat,
    aligned,
    expert_format,
)
from tandem.kernels.reference import ExpertWeights


@dataclass(frozen=True, slots=True)
class Section:
    """A section of an expert's buffer; an absent section has length 0."""

    offset: int
    num_bytes: int

    def of(self, buffer: Tensor) -> Tensor:
        """Return the section's bytes as a view of an expert's buffer."""
        return buffer[self.offset : self.offset + self.num_bytes]


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The places of an expert's parts in its buffer; the same for all experts of a layer.

    Every section starts at a multiple of 64 bytes, and so does the end (`num_bytes`): consecutive
    experts in a (num_experts, num_bytes) tensor stay aligned. `format` is the first projection's,
    and also the second's unless `second_format` is given.
    """

    format: WeightFormat
    hidden_size: int
    intermediate_size: int
    is_gated: bool
    has_bias: bool
    second_format: WeightFormat | None = None
    up: Section = field(init=False)
    up_scales: Section = field(init=False)
    down: Section = field(init=False)
    down_scales: Section = field(init=False)
    up_bias: Section = field(init=False)
    down_bias: Section = field(init=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        fmt, hidden, inner = self.format, self.hidden_size, self.intermediate_size
        sizes = {
            "up": fmt.data_bytes(self.up_rows, hidden),
            "up_scales": fmt.scale_bytes(self.up_rows, hidden),
            "down": self.down_format.data_bytes(hidden, inner),
            "down_scales": self.down_format.scale_bytes(hidden, inner),
            "up_bias": 4 * self.up_rows * self.has_bias,
            "down_bias": 4 * self.down_rows * self.has_bias,
        }
        offset = 0
        for name, size in sizes.items():
            object.__setattr__(self, name, Section(offset, size))
            offset += aligned(size)
        object.__setattr__(self, "num_bytes", offset)

    @property
    def down_format(self) -> WeightFormat:
        """The second projection's format."""
        return self.second_format or self.format

    @property
    def format_name(self) -> str:
        """The name of the format, or of both formats joined by "+", as in `expert_dtype`."""
        return expert_format(self.format, self.down_format).name

    @property
    def up_rows(self) -> int:
        """Rows of the up matrix: the padded intermediate size, twice that if gated."""
        return self.num_halves * self.format.padded_rows(self.intermediate_size)

    @property
    def down_rows(self) -> int:
        """Rows of the down matrix: the padded hidden size."""
        return self.format.padded_rows(self.hidden_size)

    @property
    def num_halves(self) -> int:
        """How many matrices alternate in the up section: 2 for gate and up, 1 for up alone."""
        return 2 if self.is_gated else 1

    def up_half(self, buffer: Tensor, half: int) -> MatrixBlocks:
        """View the blocks of a half of the up matrix: 0 is gate (or up if not gated), 1 is up."""
        data, scales = self.up.of(buffer), self.up_scales.of(buffer)
        blocks = MatrixBlocks.over(self.format, self.up_rows, self.hidden_size, data, scales)
        return blocks.every_nth(self.num_halves, half)

    def up_bias_half(self, buffer: Tensor, half: int) -> Tensor:
        """View the biases of one half's blocks: (blocks, 16) fp32."""
        biases = self.up_bias.of(buffer).view(torch.float32).view(-1, ROWS_PER_BLOCK)
        return biases[half :: self.num_halves]

    def down_blocks(self, buffer: Tensor) -> MatrixBlocks:
        """View the blocks of the down matrix."""
        data, scales = self.down.of(buffer), self.down_scales.of(buffer)
        return MatrixBlocks.over(
            self.down_format, self.hidden_size, self.intermediate_size, data, scales
        )


def unpack_expert(layout: ExpertLayout, buffer: Tensor) -> ExpertWeights:
    """Return an expert's values in fp32: `up` as [gate; up], not transposed."""
    fmt, hidden, inner = layout.format, layout.hidden_size, layout.intermediate_size
    halves = range(layout.num_halves)
    up = [decode(layout.up_half(buffer, half).read(fmt), fmt) for half in halves]
    down = decode(layout.down_blocks(buffer).read(layout.down_format), layout.down_format)
    up_bias = down_bias = None
    if layout.has_bias:
        up_bias = torch.cat([layout.up_bias_half(buffer, h).flatten()[:inner] for h in halves])
        down_bias = layout.down_bias.of(buffer).view(torch.float32)[:hidden].clone()
    return ExpertWeights(
        up=torch.cat([part[:inner, :hidden] for part in up]),
        down=down[:hidden, :inner].contiguous(),
        up_bias=up_bias,
        down_bias=down_bias,
    )


def half_rows(layout: ExpertLayout, half: int, is_interleaved: bool) -> slice:
    """Return the slice of a checkpoint's first projection's rows that is `half` (see `up_half`)."""
    inner = layout.intermediate_size
    if is_interleaved:
        return slice(half, None, layout.num_halves)
    return slice(half * inner, (half + 1) * inner)


def halves_of(layout: ExpertLayout, up: Tensor, *, is_interleaved: bool) -> list[Tensor]:
    """Return the halves of the first projection (up rows, hidden_size), not transposed."""
    return [up[half_rows(layout, half, is_interleaved)] for half in range(layout.num_halves)]


def round_up(
    layout: ExpertLayout,
    halves: Sequence[Tensor],
    *,
    out: Tensor,
    name: str,
    importance: Tensor | None = None,
) -> list[Rounding]:
    """Return the rounding jobs for the first projection's halves, (inner rows, hidden_size).

    `out` must be a zeroed buffer; `importance` (hidden_size,) is that of the matrix's inputs.
    """
    name = f"{name}: the first projection"
    return [
        Rounding(layout.up_half(out, half), layout.format, rows, name, importance)
        for half, rows in enumerate(halves)
    ]


def round_down(
    layout: ExpertLayout, down: Tensor, *, out: Tensor, name: str, importance: Tensor | None = None
) -> list[Rounding]:
    """Return the rounding jobs for the second projection (hidden_size, intermediate_size)."""
    blocks, name = layout.down_blocks(out), f"{name}: the second projection"
    return [Rounding(blocks, layout.down_format, down, name, importance)]


def write_up_bias(
    layout: ExpertLayout, bias: Tensor, *, is_interleaved: bool, out: Tensor, name: str
) -> None:
    """Write the first projection's bias, in the checkpoint's row order, into a zeroed buffer."""
    _require_bias(layout, bias, f"{name}: the first projection")
    for half in range(layout.num_halves):
        biases, own = layout.up_bias_half(out, half), bias[half_rows(layout, half, is_interleaved)]
        padded = torch.zeros(biases.shape, device="cpu")
        padded.view(-1)[: len(own)] = own
        biases.copy_(padded)


def write_down_bias(layout: ExpertLayout, bias: Tensor, *, out: Tensor, name: str) -> None:
    """Write the second projection's bias into an expert's buffer."""
    _require_bias(layout, bias, f"{name}: the second projection")
    layout.down_bias.of(out).view(torch.float32)[: layout.hidden_size] = bias


def write_up_codes(
    layout: ExpertLayout, up: CodedMatrix, *, is_interleaved: bool, out: Tensor
) -> None:
    """Write the first projection's codes (up rows, hidden_size) into an expert's buffer."""
    for half in range(layout.num_halves):
        rows = up.rows(half_rows(layout, half, is_interleaved))
        write_codes(layout.up_half(out, half), layout.format, rows, name="the first projection")


def write_down_codes(layout: ExpertLayout, down: CodedMatrix, *, out: Tensor) -> None:
    """Write the second projection's codes (hidden_size, intermediate_size) into a buffer."""
    write_codes(layout.down_blocks(out), layout.down_format, down, name="the second projection")


def order_inner_rows(layout: ExpertLayout, buffer: Tensor, order: Tensor) -> None:
    """Reorder the rows of each half of the first projection: row `order[i]` moves to row i."""
    for half in range(layout.num_halves):
        blocks = layout.up_half(buffer, half)
        coded = blocks.read(layout.format)  # a copy, including padding
        rows = torch.arange(coded.codes.shape[0], device="cpu")
        rows[: len(order)] = order
        blocks.write(layout.format, 0, coded.rows(rows))


def _require_bias(layout: ExpertLayout, bias: Tensor, name: str) -> None:
    if not layout.has_bias:
        raise ModelError(f"{name} has a bias, and the experts' outputs none; that is not read")
    if not bias.isfinite().all():
        raise ModelError(
            f"{name} has a bias that is NaN or infinite, expected finite numbers; the checkpoint "
            "is damaged: download or convert it again"
        )

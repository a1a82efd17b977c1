"""One expert as one contiguous buffer, so that a fetch is one copy."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.kernels.formats.blocks import CodedMatrix, MatrixBlocks
from tandem.kernels.formats.codes import decode
from tandem.kernels.formats.packed import write_codes, write_weight
from tandem.kernels.formats.weight_format import (
    ROWS_PER_BLOCK,
    SECTION_ALIGNMENT_BYTES,
    WeightFormat,
    expert_format,
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
    """Where the parts of an expert lie in its buffer; the same for all experts of a layer.

    Every section starts at a multiple of 64 bytes, and `num_bytes` is one too: experts that follow
    each other in a (num_experts, num_bytes) tensor stay aligned. `format` is the first
    projection's, and the second's too unless `second_format` is given.
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
            offset += -(-size // SECTION_ALIGNMENT_BYTES) * SECTION_ALIGNMENT_BYTES
        object.__setattr__(self, "num_bytes", offset)

    @property
    def down_format(self) -> WeightFormat:
        """The second projection's format."""
        return self.second_format or self.format

    @property
    def format_name(self) -> str:
        """Name the formats as an `expert_dtype` does."""
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
        """Matrices that share the up section in alternation: gate and up, or up alone."""
        return 2 if self.is_gated else 1

    def up_half(self, buffer: Tensor, half: int) -> MatrixBlocks:
        """View the blocks of one half of the up matrix: 0 the gate (or all of it), 1 the up."""
        data, scales = self.up.of(buffer), self.up_scales.of(buffer)
        blocks = MatrixBlocks.over(self.format, self.up_rows, self.hidden_size, data, scales)
        return blocks.every_nth(self.num_halves, half)

    def up_bias_half(self, buffer: Tensor, half: int) -> Tensor:
        """View the biases of one half's blocks: (blocks, 16) fp32."""
        lanes = self.up_bias.of(buffer).view(torch.float32).view(-1, ROWS_PER_BLOCK)
        return lanes[half :: self.num_halves]

    def down_blocks(self, buffer: Tensor) -> MatrixBlocks:
        """View the blocks of the down matrix."""
        data, scales = self.down.of(buffer), self.down_scales.of(buffer)
        return MatrixBlocks.over(
            self.down_format, self.hidden_size, self.intermediate_size, data, scales
        )


def pack_expert(
    layout: ExpertLayout,
    up: Tensor | CodedMatrix,
    down: Tensor | CodedMatrix,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    out: Tensor,
    is_transposed: bool = False,
    is_interleaved: bool = False,
    has_search: bool = True,
    name: str = "expert",
) -> None:
    """Write an expert into `out`, (layout.num_bytes,) uint8, every byte of it.

    `up` is (up rows, hidden_size) and `down` (hidden_size, intermediate_size), both the other way
    round if `is_transposed`. Of a gated expert `up` holds [gate; up], or the gate in even and the
    up in odd rows if `is_interleaved`; `up_bias` follows those rows. Codes (from `coded_matrix`)
    are never transposed. A bias that is None is zero. Raises `ModelError` for what does not fit.
    """
    if is_transposed:
        assert isinstance(up, Tensor), "codes are given row by row"
        assert isinstance(down, Tensor), "codes are given row by row"
        up, down = up.T, down.T
    hidden, inner = layout.hidden_size, layout.intermediate_size
    _require_shape(up, (layout.num_halves * inner, hidden), f"{name}'s up projection")
    _require_shape(down, (hidden, inner), f"{name}'s down projection")
    for bias in (up_bias, down_bias):
        require_bias(bias, layout, name)
    out.zero_()  # the gaps between sections, and the padding of the biases
    for half in range(layout.num_halves):
        rows = half_rows(layout, half, is_interleaved)
        part = up[rows] if isinstance(up, Tensor) else up.rows(rows)
        _write(layout.up_half(out, half), layout.format, part, has_search, f"{name}'s up")
        if up_bias is not None:
            write_bias(layout.up_bias_half(out, half), up_bias[rows])
    _write(layout.down_blocks(out), layout.down_format, down, has_search, f"{name}'s down")
    if down_bias is not None:
        layout.down_bias.of(out).view(torch.float32)[:hidden] = down_bias


def unpack_expert(layout: ExpertLayout, buffer: Tensor) -> ExpertWeights:
    """Return an expert's values in fp32: `up` as [gate; up], nothing transposed."""
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
    """Return the source's rows of one half."""
    inner = layout.intermediate_size
    if is_interleaved:
        return slice(half, None, layout.num_halves)
    return slice(half * inner, (half + 1) * inner)


def _write(
    blocks: MatrixBlocks,
    fmt: WeightFormat,
    source: Tensor | CodedMatrix,
    has_search: bool,
    name: str,
) -> None:
    if isinstance(source, Tensor):
        write_weight(blocks, fmt, source, has_search=has_search, name=name)
    else:
        write_codes(blocks, fmt, source, name=name)


def write_bias(lanes: Tensor, bias: Tensor) -> None:
    """Write a bias into its blocks (blocks, 16), the last one padded with zeros."""
    padded = torch.zeros(lanes.shape, device="cpu")
    padded.view(-1)[: bias.shape[0]] = bias
    lanes.copy_(padded)


def _require_shape(source: Tensor | CodedMatrix, expected: tuple[int, int], name: str) -> None:
    found = tuple((source if isinstance(source, Tensor) else source.codes).shape)
    if found != expected:
        raise ModelError(
            f"{name} has shape {found}, expected {expected}; check the sizes in config.json, and "
            "whether the checkpoint has its weights transposed"
        )


def require_bias(bias: Tensor | None, layout: ExpertLayout, name: str) -> None:
    """Raise `ModelError` for a bias that the layout has no room for, or that is not finite."""
    if bias is None:
        return
    if not layout.has_bias:
        raise ModelError(f"{name} has a bias, expected none; make its layout with has_bias=True")
    if not bias.isfinite().all():
        raise ModelError(
            f"{name} has a bias that is NaN or infinite, expected finite numbers; the checkpoint "
            "is damaged: download or convert it again"
        )

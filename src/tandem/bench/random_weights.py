"""Random weights directly in packed form; they cost the kernels as much time as real weights."""

import torch
from torch import Tensor

from tandem.kernels.formats.expert import ExpertLayout
from tandem.kernels.formats.grids import BitField
from tandem.kernels.formats.packed import PackedMatrix
from tandem.kernels.formats.weight_format import ROWS_PER_BLOCK, WeightFormat
from tandem.kernels.memory import allocate_buffers

# Only so many experts of a layer are drawn. The others are copies at their own addresses.
_DRAWN_EXPERTS = 2
_STD = 0.02
_E4M3_STD = 120.0
_AT_ONCE = 1 << 24


def random_matrix(rows: int, cols: int, fmt: WeightFormat) -> PackedMatrix:
    """Return a packed (rows, cols) matrix: random codes with scales of usual size."""
    matrix = PackedMatrix.empty(rows, cols, fmt)
    _draw_codes(matrix.data, fmt)
    if matrix.scales is not None:
        _fill_scales(matrix.scales.view(torch.uint8), fmt)
    return matrix


def random_experts(
    layout: ExpertLayout, num_experts: int, *, has_huge_pages: bool = True
) -> Tensor:
    """Return packed experts (num_experts, bytes): random codes with scales of usual size."""
    store = allocate_buffers(num_experts, layout.num_bytes, has_huge_pages=has_huge_pages)
    for drawn in store[:_DRAWN_EXPERTS]:
        for data, scales, fmt in (
            (layout.up, layout.up_scales, layout.format),
            (layout.down, layout.down_scales, layout.down_format),
        ):
            _draw_codes(data.of(drawn), fmt)
            _fill_scales(scales.of(drawn), fmt)
        for section in (layout.up_bias, layout.down_bias):
            section.of(drawn).zero_()
    for expert in range(_DRAWN_EXPERTS, num_experts):
        store[expert] = store[expert % _DRAWN_EXPERTS]
    return store


def _draw_codes(buffer: Tensor, fmt: WeightFormat) -> None:
    if fmt.kind in ("bf16", "fp16"):
        buffer.view(torch.bfloat16 if fmt.kind == "bf16" else torch.float16).normal_(std=_STD)
    elif fmt.kind == "fp8":
        for part in buffer.view(-1).split(_AT_ONCE):  # as rounding by the largest of 2,048 has it
            codes = torch.randn(part.shape, device="cpu").mul_(_E4M3_STD).clamp_(-448, 448)
            part.copy_(codes.to(torch.float8_e4m3fn).view(torch.uint8))
    else:
        buffer.view(torch.int64).random_()  # 63 random bits; eight times as fast as drawing bytes
        grid = fmt.encoding.grid
        if grid is not None and grid.factor is not None:
            _make_finite(buffer.view(torch.int32), grid.words, grid.factor)


def _make_finite(words: Tensor, per_super: int, factor: BitField) -> None:
    """Set the sign and the upper exponent bits of factors in random words, so that all are finite.

    The factors become about 2^-10.
    """
    word, bit = divmod(factor.at(3), 32)  # the highest bit of the factor's field
    parts = words.view(-1, per_super, ROWS_PER_BLOCK)[:, word]
    parts.bitwise_and_((1 << bit) - 1).bitwise_or_(1 << bit)


def _fill_scales(scales: Tensor, fmt: WeightFormat) -> None:
    if fmt.kind == "nvfp4":
        scales.fill_(0x20)
    elif fmt.encoding.super_bytes:
        blocks = scales.view(-1, fmt.scale_bytes(ROWS_PER_BLOCK, fmt.encoding.super_cols))
        factors = fmt.encoding.super_bytes * ROWS_PER_BLOCK
        blocks[:, :factors].view(torch.float16).fill_(_STD / 2 ** (fmt.bits + 5))
        blocks[:, factors:].random_(32, 64)
    elif fmt.kind == "mxfp4":
        scales.fill_(120)  # 2^-7
    elif fmt.kind == "fp8":
        scales.view(torch.float32).fill_(_STD / 100)
    elif scales.numel():
        scales.view(torch.float16).fill_(_STD / 2 ** (fmt.bits - 1))

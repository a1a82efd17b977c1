"""Inputs of the format tests: weights that are hard to round, and checkpoint codes."""

from typing import Any

import torch
from torch import Tensor

from tandem.kernels.formats import FORMATS, CodedMatrix, WeightFormat, coded_matrix
from tandem.kernels.formats.expert import (
    ExpertLayout,
    halves_of,
    round_down,
    round_up,
    write_down_bias,
    write_down_codes,
    write_up_bias,
    write_up_codes,
)
from tandem.kernels.formats.grid_words import read_words
from tandem.kernels.formats.packed import PackedMatrix, pack, write_codes, write_weights

# Whole blocks, one less, one more, one weight.
SHAPES = [(16, 32), (16, 128), (15, 127), (37, 75), (1, 1), (48, 257), (130, 300)]

# Formats that weights can be quantised to; the others come from files.
ROUNDED = [f for f in FORMATS if not f.kind.startswith("iq1")]
GRIDS = [f for f in ROUNDED if f.encoding.grid is not None]
# Formats that `pack_codes` fills; the others come from blocks of GGUF files.
CODED = [f for f in FORMATS if f.group_size and not (f.encoding.super_cols or f.encoding.table)]


def draw_weights(rows: int, cols: int, seed: int = 0) -> Tensor:
    """Return Gaussian weights with outliers and, if there is room, a zero row and a zero group."""
    generator = torch.Generator().manual_seed(seed + rows * 1000 + cols)
    weights = torch.randn(rows, cols, generator=generator) * 0.02
    weights[torch.rand(rows, cols, generator=generator) < 0.01] *= 20
    if rows > 1:
        weights[rows // 2] = 0
        weights[-1, :128] = 0
    return weights


def draw_codes(rows: int, cols: int, fmt: WeightFormat) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return random codes, scales and zero points as `pack_codes` takes them."""
    assert fmt.group_size is not None
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    groups = -(-cols // fmt.group_size)
    low, high = {"int4": (-8, 8), "int5": (-16, 16), "int8": (-127, 128)}.get(fmt.kind, (0, 16))
    codes = torch.randint(low, high, (rows, cols), generator=generator, dtype=torch.int16)
    scales = torch.randn(rows, groups, generator=generator).half()
    if fmt.kind == "mxfp4":
        exponents = torch.randint(100, 140, (rows, groups), generator=generator)
        return codes.to(torch.uint8), exponents.to(torch.uint8), None
    if fmt.kind == "fp8":
        e4m3 = torch.randn(rows, cols, generator=generator).to(torch.float8_e4m3fn)
        return e4m3, torch.rand(-(-rows // 128), groups, generator=generator), None
    if fmt.encoding.has_minima:
        return codes, scales, torch.randint(0, 17, (rows, groups), generator=generator)
    return codes, scales, None


def pack_codes(
    codes: Tensor,
    scales: Tensor,
    fmt: WeightFormat,
    *,
    zeros: Tensor | None = None,
    name: str = "weight",
) -> PackedMatrix:
    """Pack a matrix that is already quantised."""
    packed = PackedMatrix.empty(codes.shape[0], codes.shape[1], fmt)
    coded = coded_matrix(codes, scales, fmt, zeros=zeros, name=name)
    write_codes(packed.blocks, fmt, coded, name=name)
    return packed


def draw_lines(rows: int, cols: int, fmt: WeightFormat) -> CodedMatrix:
    """Return random file contents of a grid format: any words, and factors of usual size."""
    words = torch.randint(-(2**31), 2**31, (rows, fmt.dwords(cols)), dtype=torch.int32)
    codes, scales, _ = read_words(fmt, words)
    largest = 15 * max(fmt.encoding.table) * cols**0.5
    factors = torch.rand(rows, fmt.supers(cols)) * 2 / largest
    return CodedMatrix(codes, scales, None, factors.half())


def pack_any(weights: Tensor, fmt: WeightFormat, **how: Any) -> PackedMatrix:
    """Quantise weights; for a grid format return a random matrix of the same shape instead."""
    if fmt.encoding.grid is None:
        return pack(weights, fmt, **how)
    rows, cols = weights.shape
    packed = PackedMatrix.empty(rows, cols, fmt)
    write_codes(packed.blocks, fmt, draw_lines(rows, cols, fmt))
    return packed


def pack_expert(
    layout: ExpertLayout,
    up: Tensor | CodedMatrix,
    down: Tensor | CodedMatrix,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    out: Tensor,
    is_interleaved: bool = False,
    has_search: bool = True,
) -> None:
    """Write an expert part by part, as a layer of the host store does while loading."""
    out.zero_()
    roundings = []
    if isinstance(up, CodedMatrix):
        write_up_codes(layout, up, is_interleaved=is_interleaved, out=out)
    else:
        halves = halves_of(layout, up, is_interleaved=is_interleaved)
        roundings += round_up(layout, halves, out=out, name="expert 3")
    if isinstance(down, CodedMatrix):
        write_down_codes(layout, down, out=out)
    else:
        roundings += round_down(layout, down, out=out, name="expert 3")
    write_weights(roundings, has_search=has_search)
    if up_bias is not None:
        write_up_bias(layout, up_bias, is_interleaved=is_interleaved, out=out, name="expert 3")
    if down_bias is not None:
        write_down_bias(layout, down_bias, out=out, name="expert 3")


def drawn_matrix(rows: int, cols: int, fmt: WeightFormat) -> PackedMatrix:
    """Return a packed matrix of random codes."""
    codes, scales, zeros = draw_codes(rows, cols, fmt)
    return pack_codes(codes, scales, fmt, zeros=zeros)

"""Tests of an expert's buffer: one canonical order for any source."""

import pytest
import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.experts.store.host_store import HostStore
from tandem.kernels.formats import (
    FORMATS,
    CodedMatrix,
    ExpertLayout,
    WeightFormat,
    coded_matrix,
    find_format,
    pack,
    unpack,
    unpack_expert,
)
from tandem.kernels.formats.packed import PackedMatrix, write_codes
from tests.kernels.formats.sources import CODED, ROUNDED, draw_codes, draw_weights, pack_expert
from tests.kernels.formats.test_layout import by_name

HIDDEN, INNER = 75, 37


def layout_of(fmt: WeightFormat, *, is_gated: bool = True, has_bias: bool = True) -> ExpertLayout:
    return ExpertLayout(fmt, HIDDEN, INNER, is_gated, has_bias)


def buffers(layout: ExpertLayout) -> Tensor:
    """Return the memory of three experts, filled with garbage."""
    return torch.full((3, layout.num_bytes), 0xA5, dtype=torch.uint8)


def values_of(weights: Tensor, fmt: WeightFormat) -> Tensor:
    return unpack(pack(weights, fmt))


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("fmt", ROUNDED, ids=by_name)
def test_an_expert_comes_back_as_its_rounded_parts(
    fmt: WeightFormat, is_gated: bool, has_bias: bool
) -> None:
    layout = layout_of(fmt, is_gated=is_gated, has_bias=has_bias)
    halves = [draw_weights(INNER, HIDDEN, seed) for seed in range(1 + is_gated)]
    down = draw_weights(HIDDEN, INNER)
    up_bias, down_bias = torch.randn(INNER * len(halves)), torch.randn(HIDDEN)
    biases = (up_bias, down_bias) if has_bias else (None, None)
    memory = buffers(layout)
    pack_expert(layout, torch.cat(halves), down, *biases, out=memory[1])
    found = unpack_expert(layout, memory[1])
    assert torch.equal(found.up, torch.cat([values_of(half, fmt) for half in halves]))
    assert torch.equal(found.down, values_of(down, fmt))
    assert not found.is_transposed
    for bias, expected in zip((found.up_bias, found.down_bias), biases, strict=True):
        assert (bias is None) == (expected is None)
        assert bias is None or expected is None or torch.equal(bias, expected)
    assert (memory[0::2] == 0xA5).all()  # the neighbours


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("fmt", ROUNDED, ids=by_name)
def test_orientation_and_order_of_the_source_leave_no_trace(
    fmt: WeightFormat, is_transposed: bool, is_interleaved: bool
) -> None:
    gate, up = draw_weights(INNER, HIDDEN), draw_weights(INNER, HIDDEN, 1)
    down, bias = draw_weights(HIDDEN, INNER), torch.randn(2 * INNER)
    memory = buffers(layout_of(fmt))[0]
    pack_expert(layout_of(fmt), torch.cat([gate, up]), down, bias, out=memory)
    rows = torch.cat([gate, up])
    if is_interleaved:
        rows = torch.stack([gate, up], 1).flatten(0, 1)
        bias = torch.stack([bias[:INNER], bias[INNER:]], 1).flatten()
    parts = {
        "gate_up_proj": rows.T if is_transposed else rows,
        "down_proj": down.T if is_transposed else down,
        "gate_up_proj_bias": bias,
        "down_proj_bias": torch.zeros(HIDDEN),
    }
    layer = HostStore().add_layer(
        "experts",
        {name: (1, *part.shape) for name, part in parts.items()},
        expert_dtype=fmt,
        is_transposed=is_transposed,
        is_interleaved=is_interleaved,
    )
    for name, part in parts.items():
        layer.put_expert(name, 0, [part.contiguous()])
    assert torch.equal(layer.stored()["experts"][0], memory)


def test_blocks_of_gate_and_up_take_turns() -> None:
    fmt = find_format("bf16")
    layout = layout_of(fmt)
    gate, up = torch.full((INNER, HIDDEN), 1.0), torch.full((INNER, HIDDEN), 2.0)
    memory = buffers(layout)[0]
    bias = torch.cat([torch.full((INNER,), 3.0), torch.full((INNER,), 4.0)])
    pack_expert(layout, torch.cat([gate, up]), torch.zeros(HIDDEN, INNER), bias, out=memory)
    words = layout.up.of(memory).view(torch.bfloat16).view(-1, fmt.padded_cols(HIDDEN) // 2, 16, 2)
    assert words[:, 0, 0, 0].tolist() == [1, 2, 1, 2, 1, 2]
    assert words[4:, 0, :, 0].tolist() == [[1.0] * 5 + [0.0] * 11, [2.0] * 5 + [0.0] * 11]
    biases = layout.up_bias.of(memory).view(torch.float32).view(-1, 16)
    assert biases[:, 0].tolist() == [3, 4, 3, 4, 3, 4]
    assert biases[4:].tolist() == [[3.0] * 5 + [0.0] * 11, [4.0] * 5 + [0.0] * 11]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("fmt", FORMATS, ids=by_name)
def test_sections_follow_each_other_at_cache_lines(fmt: WeightFormat, has_bias: bool) -> None:
    layout = layout_of(fmt, has_bias=has_bias)
    sections = [
        layout.up,
        layout.up_scales,
        layout.down,
        layout.down_scales,
        layout.up_bias,
        layout.down_bias,
    ]
    end = 0
    for section in sections:
        assert section.offset % 64 == 0
        assert 0 <= section.offset - end < 64
        end = section.offset + section.num_bytes
    assert layout.num_bytes % 64 == 0
    assert 0 <= layout.num_bytes - end < 64
    assert layout.up.num_bytes == fmt.data_bytes(2 * 48, HIDDEN)
    assert layout.down_scales.num_bytes == fmt.scale_bytes(HIDDEN, INNER)
    assert layout.up_bias.num_bytes == (2 * 48 * 4 if has_bias else 0)
    assert layout.down_bias.num_bytes == (80 * 4 if has_bias else 0)


def draw_coded(rows: int, cols: int, fmt: WeightFormat) -> CodedMatrix:
    codes, scales, zeros = draw_codes(rows, cols, fmt)
    return coded_matrix(codes, scales, fmt, zeros=zeros)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("fmt", CODED, ids=by_name)
def test_codes_go_into_an_expert_without_rounding(fmt: WeightFormat, is_interleaved: bool) -> None:
    inner = 80  # fp8's second block has rows of both halves
    layout = ExpertLayout(fmt, HIDDEN, inner, is_gated=True, has_bias=False)
    up, down = draw_coded(2 * inner, HIDDEN, fmt), draw_coded(HIDDEN, inner, fmt)
    memory = buffers(layout)[0]
    pack_expert(layout, up, down, out=memory, is_interleaved=is_interleaved)
    found = unpack_expert(layout, memory)
    rows = unpack_codes(up, fmt)
    if is_interleaved:
        rows = torch.cat([rows[0::2], rows[1::2]])
    assert torch.equal(found.up, rows)
    assert torch.equal(found.down, unpack_codes(down, fmt))


def test_fp8_scales_that_change_inside_a_block_are_refused() -> None:
    fmt = find_format("fp8")
    layout = ExpertLayout(fmt, HIDDEN, 72, is_gated=True, has_bias=False)
    up, down = draw_coded(2 * 72, HIDDEN, fmt), draw_coded(HIDDEN, 72, fmt)
    with pytest.raises(ModelError, match="first projection has fp8 scales that change inside a"):
        pack_expert(layout, up, down, out=buffers(layout)[0])


def unpack_codes(coded: CodedMatrix, fmt: WeightFormat) -> Tensor:
    packed = PackedMatrix.empty(coded.codes.shape[0], coded.codes.shape[1], fmt)
    write_codes(packed.blocks, fmt, coded)
    return unpack(packed)


def test_what_does_not_fit_is_refused_by_name() -> None:
    layout = layout_of(find_format("int8"))
    up, down, memory = torch.zeros(2 * INNER, HIDDEN), torch.zeros(HIDDEN, INNER), buffers(layout)
    nan = torch.full((2 * INNER,), torch.nan)
    with pytest.raises(ModelError, match="3: the second projection has weights that are NaN or"):
        pack_expert(layout, up, down / 0, out=memory[0])
    with pytest.raises(ModelError, match="3: the first projection has a bias that is NaN"):
        pack_expert(layout, up, down, nan, out=memory[0])
    with pytest.raises(ModelError, match="3: the second projection has a bias that is NaN"):
        pack_expert(layout, up, down, None, nan[:HIDDEN], out=memory[0])
    with pytest.raises(ModelError, match="has a bias, and the experts' outputs none"):
        pack_expert(layout_of(find_format("int8"), has_bias=False), up, down, nan, out=memory[0])

"""Tests of codes of quantised checkpoints: kept exactly, or refused with a reason."""

import pytest
import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.kernels.formats import WeightFormat, find_format, unpack
from tests.kernels.formats.sources import CODED, SHAPES, draw_codes, pack_codes
from tests.kernels.formats.test_layout import E2M1, by_name


def spread(scales: Tensor, fmt: WeightFormat, cols: int) -> Tensor:
    """Repeat values (rows, groups) for each column of the group."""
    return scales.repeat_interleave(fmt.col_multiple, 1)[:, :cols]


def expected_values(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, fmt: WeightFormat
) -> Tensor:
    rows, cols = codes.shape
    if fmt.kind == "fp8":
        by_row = scales.repeat_interleave(128, 0)[:rows]
        return codes.float() * spread(by_row, fmt, cols)
    if fmt.kind == "mxfp4":
        table = torch.tensor([*E2M1, *(-value for value in E2M1)])
        return table[codes.int()] * torch.exp2(spread(scales, fmt, cols).float() - 127)
    values = codes.float() * spread(scales, fmt, cols).float()
    if zeros is None:
        return values
    minima = (-zeros.float() * scales.float()).half()
    return values + spread(minima, fmt, cols).float()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fmt", CODED, ids=by_name)
def test_codes_keep_their_values(fmt: WeightFormat, shape: tuple[int, int]) -> None:
    codes, scales, zeros = draw_codes(*shape, fmt)
    packed = pack_codes(codes, scales, fmt, zeros=zeros)
    assert torch.equal(unpack(packed), expected_values(codes, scales, zeros, fmt))


@pytest.mark.parametrize("zero", [0, 1, 2, 4, 8, 16])
def test_zero_points_that_are_powers_of_two_are_exact(zero: int) -> None:
    fmt = find_format("int4z")
    codes, scales, _ = draw_codes(16, 64, fmt)
    packed = pack_codes(codes, scales, fmt, zeros=torch.full(scales.shape, zero))
    assert torch.equal(unpack(packed), (codes - zero) * spread(scales.float(), fmt, 64))


def test_other_zero_points_are_within_a_hundredth_of_a_step() -> None:
    fmt = find_format("int4z")
    codes, scales, zeros = draw_codes(64, 256, fmt)
    assert zeros is not None
    step = spread(scales.float(), fmt, 256)
    exact = (codes - spread(zeros, fmt, 256)) * step
    values = unpack(pack_codes(codes, scales, fmt, zeros=zeros))
    assert ((values - exact).abs() <= 15 * 2.0**-11 * step.abs() + 1e-7).all()


@pytest.mark.parametrize("fmt", CODED, ids=by_name)
def test_bfloat16_scales_are_taken_where_fp16_holds_them(fmt: WeightFormat) -> None:
    if fmt.kind in ("mxfp4", "fp8"):
        return  # their scales have types of their own
    codes, _, zeros = draw_codes(16, 128, fmt)
    scales = torch.full((16, 128 // fmt.col_multiple), 0.0123, dtype=torch.bfloat16)
    packed = pack_codes(codes, scales, fmt, zeros=zeros)
    assert torch.equal(unpack(packed), expected_values(codes, scales, zeros, fmt))


def refuse(
    match: str, codes: Tensor, scales: Tensor, name: str, zeros: Tensor | None = None
) -> None:
    with pytest.raises(ModelError, match=match):
        pack_codes(codes, scales, find_format(name), zeros=zeros, name="experts.down")


def test_scales_that_fp16_cannot_hold_are_refused() -> None:
    codes = torch.zeros(16, 32, dtype=torch.int8)
    refuse(
        "scales hold 0.1.*which fp16 cannot hold exactly", codes, torch.full((16, 1), 0.1), "int4"
    )
    refuse("scales hold 1.*e\\+30", codes, torch.full((16, 1), 1e30), "int4")
    refuse("scales hold NaN", codes, torch.full((16, 1), float("nan")), "int4")


def test_codes_out_of_range_are_refused() -> None:
    scales = torch.ones(16, 1)
    refuse(r"codes from 9 to 9, expected -8 to 7", torch.full((16, 32), 9), scales, "int4")
    refuse(r"expected -128 to 127", torch.full((16, 32), -129), scales, "int8-g32")
    refuse(r"expected 0 to 15", torch.full((16, 32), 16), scales, "int4z", scales)


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    codes = torch.zeros(16, 64, dtype=torch.int8)
    refuse(r"scales have shape \(2, 16\), expected \(16, 2\)", codes, torch.ones(2, 16), "int4")
    refuse("zero points have shape", codes, torch.ones(16, 2), "int4z", torch.ones(2, 16))
    refuse("has no zero points", codes, torch.ones(16, 2), "int4z")
    refuse(r"expected \(1, 1\)", codes.view(torch.uint8), torch.ones(16, 1), "fp8")
    refuse("has no codes and scales", codes, torch.ones(16, 2), "bf16")


def test_nan_among_small_floats_is_refused() -> None:
    codes = torch.zeros(16, 32, dtype=torch.uint8)
    nan = torch.full((16, 1), 255, dtype=torch.uint8)
    refuse("scales up to 255, expected E8M0 bytes up to 252", codes, nan, "mxfp4")
    refuse("torch.float32 scales", codes, torch.ones(16, 1), "mxfp4")
    refuse("NaN among its e4m3 codes", codes + 0xFF, torch.ones(1, 1), "fp8")
    refuse("scales hold NaN", codes, torch.full((1, 1), float("inf")), "fp8")

"""Tests of rounding: exact where possible, bounded error otherwise, or refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.kernels.formats import WeightFormat, find_format, pack, unpack
from tests.kernels.formats.sources import GRIDS, ROUNDED, draw_weights
from tests.kernels.formats.test_layout import by_name

# Largest distance of a weight to its value without the search, as a share of its group's largest
# magnitude: half a step, and for the minima, fp16's rounding of a number as large as the range.
# With super-blocks scales and minima are off by half of a 127th of the super-block's largest.
BOUNDS = {
    "int4": 0.5 / 7, "int8": 0.5 / 127, "int4z": 1 / 15, "mxfp4": 0.25, "fp8": 2**-4,
    "q4_k": 1 / 15 + 1.5 / 127, "q5_k": 1 / 31 + 1.5 / 127, "q6_k": 0.5 / 31 + 0.5 / 127,
    "int5": 0.5 / 15, "int5z": 1 / 31, "iq4_nl": 12 / 113, "iq4_xs": 12 / 113 + 0.5 / 127,
    "nvfp4": 0.25, "q2_k": 1 / 3 + 4.5 / 15, "q3_k": 0.5 / 3 + 0.5 / 127,
}  # fmt: skip
GROUPED = [fmt for fmt in ROUNDED if fmt.group_size is not None]
FP16_SLACK = 2**-9


def group_errors(weights: Tensor, values: Tensor, fmt: WeightFormat) -> Tensor:
    """Return squared errors per group, for fp8 per 16 rows, in double precision."""
    missing = fmt.padded_cols(weights.shape[1]) - weights.shape[1]
    loss = torch.nn.functional.pad((weights.double() - values.double()).square(), (0, missing))
    errors = loss.unflatten(1, (-1, fmt.col_multiple)).sum(-1)
    if fmt.kind != "fp8":
        return errors
    rows = torch.nn.functional.pad(errors, (0, 0, 0, -errors.shape[0] % 16))
    return rows.unflatten(0, (-1, 16)).sum(1)


ONE_SCALE = [f for f in ROUNDED if f.kind != "fp8" and not f.encoding.has_minima]
ONE_SCALE = [f for f in ONE_SCALE if not f.encoding.super_cols]


@pytest.mark.parametrize("fmt", ONE_SCALE, ids=by_name)
def test_values_of_a_format_survive_it(fmt: WeightFormat) -> None:
    values = unpack(pack(draw_weights(40, 200), fmt))
    again = unpack(pack(values, fmt))
    # Grouped scales are computed again, hence to fp16's precision only.
    torch.testing.assert_close(again, values, rtol=0 if fmt.group_size is None else 2e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_formats_keep_every_weight(dtype: torch.dtype) -> None:
    weights = draw_weights(33, 75).to(dtype)
    fmt = find_format("bf16" if dtype == torch.bfloat16 else "fp16")
    assert torch.equal(unpack(pack(weights, fmt)), weights.float())


@pytest.mark.parametrize("has_search", [False, True])
@pytest.mark.parametrize("fmt", ROUNDED, ids=by_name)
def test_zeros_stay_zero(fmt: WeightFormat, has_search: bool) -> None:
    zeros = torch.zeros(20, 200)
    assert torch.equal(unpack(pack(zeros, fmt, has_search=has_search)), zeros)


weight_matrices = st.builds(
    lambda rows, cols, seed, exponent: draw_weights(rows, cols, seed) * 2.0**exponent,
    st.integers(1, 40),
    st.integers(1, 200),
    st.integers(0, 2**32),
    st.integers(-10, 12),
)


@pytest.mark.parametrize("fmt", [f for f in GROUPED if f not in GRIDS], ids=by_name)
@settings(max_examples=30)
@given(weights=weight_matrices)
def test_no_weight_is_further_than_half_a_step(fmt: WeightFormat, weights: Tensor) -> None:
    values = unpack(pack(weights, fmt, has_search=False))
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[1] % fmt.col_multiple)).abs()
    peak = padded.unflatten(1, (-1, fmt.col_multiple)).amax(-1)
    if fmt.kind == "fp8":  # 16 rows share a scale
        peak[:] = torch.cat([part.amax(0).expand_as(part) for part in peak.split(16)])
    limit = peak.repeat_interleave(fmt.col_multiple, 1)[:, : weights.shape[1]]
    # fp16's smallest step, times the largest byte and code that it may be multiplied with.
    step = 2.0**-24 * 128 * (max((32, *fmt.encoding.table)) if fmt.encoding.super_cols else 1)
    bound = (BOUNDS[fmt.kind] + FP16_SLACK) * limit + step
    assert ((weights - values).abs() <= bound).all()


def unstretched(weights: Tensor, values: Tensor, fmt: WeightFormat) -> Tensor:
    """Return values scaled by the factor of least error; super-blocks' search enlarges values."""
    if not fmt.encoding.super_cols:
        return values
    x, v = (one.double().unflatten(1, (-1, fmt.col_multiple)) for one in (weights, values))
    factor = ((x * v).sum(-1) / (v * v).sum(-1)).nan_to_num(1).clamp(0, 1)
    return (v * factor[..., None]).flatten(1)


@pytest.mark.parametrize("fmt", GROUPED, ids=by_name)
@settings(max_examples=30)
@given(weights=weight_matrices)
def test_the_search_is_never_worse_than_absmax(fmt: WeightFormat, weights: Tensor) -> None:
    cols = weights.shape[1]
    weights = torch.nn.functional.pad(weights, (0, fmt.padded_cols(cols) - cols))  # they count, too
    if fmt.encoding.super_cols:  # of a size for which super-scales are not subnormal in fp16
        weights = weights / weights.abs().amax(-1, keepdim=True).clamp(min=1e-30) * 1024
    plain = group_errors(weights, unpack(pack(weights, fmt, has_search=False)), fmt)
    searched = group_errors(weights, unstretched(weights, unpack(pack(weights, fmt)), fmt), fmt)
    energy = group_errors(weights, torch.zeros_like(weights), fmt)
    # fp32 sums: a tie may fall to either side by their rounding. Stretched factors are rounded once
    # more to fp16, a scale's and a minimum's to either side.
    more, slack = (5e-2, 1e-4) if fmt.encoding.super_cols else (1e-4, 1e-6)
    assert (searched <= plain * (1 + more) + slack * energy).all()


@pytest.mark.parametrize(
    ("name", "gain"), [("int4", 0.85), ("int4z", 0.93), ("int8", 0.98), ("mxfp4", 0.99)]
)
def test_the_search_gains_on_gaussian_weights(name: str, gain: float) -> None:
    fmt = find_format(name)
    weights = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))
    plain = (weights - unpack(pack(weights, fmt, has_search=False))).norm()
    assert (weights - unpack(pack(weights, fmt))).norm() < gain * plain


@pytest.mark.parametrize("fmt", GROUPED, ids=by_name)
def test_importance_moves_the_error_to_what_matters_less(fmt: WeightFormat) -> None:
    weights = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    importance = torch.where(torch.arange(256) % 4 == 0, 100.0, 1.0)
    even = (unpack(pack(weights, fmt)) - weights).square() * importance
    weighed = (unpack(pack(weights, fmt, importance=importance)) - weights).square() * importance
    assert weighed.sum() <= even.sum()


def test_mxfp4_cuts_a_peak_that_counts_little() -> None:
    weights, importance = torch.full((16, 32), 0.1875), torch.ones(32)
    weights[:, 0], importance[0] = 1.9, 1e-3
    values = unpack(pack(weights, find_format("mxfp4"), importance=importance))
    assert torch.equal(values[:, 1:], weights[:, 1:])  # halves of the peak's own steps
    assert torch.equal(values[:, 0], torch.full((16,), 0.75))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("fmt", ROUNDED, ids=by_name)
def test_nan_and_infinity_are_refused_by_name(fmt: WeightFormat, bad: float) -> None:
    weights = draw_weights(20, 40)
    weights[17, 3] = bad
    with pytest.raises(ModelError, match=r"experts\.3\.up has weights that are NaN or infinite"):
        pack(weights, fmt, name="experts.3.up")


@pytest.mark.parametrize("name", ["fp16", "int4", "int4z", "int8", "q4_k", "q6_k", "iq2_s"])
def test_weights_too_large_for_fp16_scales_are_refused(name: str) -> None:
    weights = torch.full((16, 128), 1e30)
    with pytest.raises(
        ModelError, match=r"w has weights too large for .*, largest magnitude 1e\+30"
    ):
        pack(weights, find_format(name), name="w")


def test_nothing_is_rounded_to_iq1() -> None:
    with pytest.raises(ModelError, match=r"w cannot be rounded to iq1_s, .* only read from files"):
        pack(draw_weights(16, 256), find_format("iq1_s"), name="w")


# Relative errors of llama.cpp's values for these weights, which all count alike, at the best scale
# for all of them (0.3.36 of llama-cpp-python).
LLAMA_CPP = {
    "iq2_xxs": 0.3311, "iq2_xs": 0.2883, "iq2_s": 0.2416, "iq3_xxs": 0.1794, "iq3_s": 0.1312,
}  # fmt: skip


@pytest.mark.parametrize("fmt", GRIDS, ids=by_name)
def test_lines_lose_less_than_llama_cpps(fmt: WeightFormat) -> None:
    weights = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))
    values = unpack(pack(weights, fmt))
    alike = (weights * values).sum() / (weights.norm() * values.norm())
    assert (1 - alike**2).sqrt() < LLAMA_CPP[fmt.kind]


@pytest.mark.parametrize("has_search", [False, True])
@pytest.mark.parametrize("fmt", GRIDS, ids=by_name)
def test_values_are_not_smaller_than_weights(fmt: WeightFormat, has_search: bool) -> None:
    """If rounding made all weights of a layer smaller, the errors of layers would add up."""
    weights = torch.randn(64, 1024, generator=torch.Generator().manual_seed(2)) * 0.02
    importance = torch.rand(1024, generator=torch.Generator().manual_seed(3))
    values = unpack(pack(weights, fmt, importance=importance, has_search=has_search))
    along = (weights * values * importance).sum(1) / (weights.square() * importance).sum(1)
    assert (along - 1).abs().max() < 1e-3


@pytest.mark.parametrize("name", ["bf16", "mxfp4", "fp8"])
def test_formats_with_wide_scales_hold_large_weights(name: str) -> None:
    weights = draw_weights(16, 128) * 1e38
    values = unpack(pack(weights, find_format(name)))
    assert values.isfinite().all()
    assert ((values - weights).double().norm() / weights.double().norm()) < 0.2


@pytest.mark.parametrize("scale", [1e-6, 1e-7, 1e-8, 1e-30, 1e-41])
@pytest.mark.parametrize("fmt", ROUNDED, ids=by_name)
def test_tiny_weights_lose_at_most_themselves_and_fp16s_step(
    fmt: WeightFormat, scale: float
) -> None:
    weights = torch.randn(16, 128, generator=torch.Generator().manual_seed(3)) * scale
    values = unpack(pack(weights, fmt))
    step = 2.0**-24 * (128 if fmt.encoding.element in ("integer", "table") else 1)
    assert (
        (values - weights).abs() <= torch.maximum(weights.abs().amax(), torch.tensor(step))
    ).all()


@pytest.mark.parametrize("name", ["int4", "int4z"])
def test_all_codes_of_four_bits_are_used(name: str) -> None:
    weights = torch.randn(64, 256, generator=torch.Generator().manual_seed(4))
    nibbles = pack(weights, find_format(name)).data
    assert torch.cat([nibbles & 15, nibbles >> 4]).unique().tolist() == list(range(16))


def test_a_group_without_spread_keeps_its_value_with_zero_points() -> None:
    weights = torch.full((16, 64), 0.375)
    assert torch.equal(unpack(pack(weights, find_format("int4z"))), weights)


@pytest.mark.parametrize("name", ["int4", "int5", "int8-g32"])
def test_a_peak_that_counts_little_is_cut(name: str) -> None:
    """Each group has such a peak; trying many scales is hardly better than the search."""
    fmt, generator = find_format(name), torch.Generator().manual_seed(0)
    weights = torch.randn(64, 256, generator=generator)
    weights[:, ::32] *= 1.8
    importance = torch.ones(256)
    importance[::32] = 0.02
    loss = (unpack(pack(weights, fmt, importance=importance)) - weights).square() * importance
    groups, counts = weights.unflatten(1, (-1, 32)), importance.unflatten(0, (-1, 32))
    low, high = fmt.encoding.codes
    least = torch.full(groups.shape[:2], torch.inf)
    for peak in torch.arange(0.5 * high, 1.8 * high, 0.02 * high).tolist():
        for end in (peak, -peak):
            scales = groups.abs().amax(-1, keepdim=True) / end
            codes = (groups / scales).round().clamp(low, high)
            errors = ((codes * scales - groups).square() * counts).sum(-1)
            least = torch.minimum(least, errors)
    assert loss.sum() <= 1.06 * least.sum()


@pytest.mark.parametrize("name", ["q2_k", "q3_k", "q4_k", "iq4_xs", "iq2_s"])
def test_products_with_the_weights_are_right(name: str) -> None:
    """Values with the least error have too small products with the weights."""
    weights = 1024 * torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))
    values = unpack(pack(weights, find_format(name)))  # whose factors are not subnormal in fp16
    supers = [one.view(64, 4, 256) for one in (values, weights)]
    kept = (supers[0] * supers[1]).sum(-1) / supers[1].square().sum(-1)
    assert kept.min() > 1 - 2e-3  # fp16's step, in two factors
    assert kept.mean() < 1 + 2e-3

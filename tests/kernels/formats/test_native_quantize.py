"""Tests of native rounding against the torch reference: equal bytes on every instruction set."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.kernels import engine
from tandem.kernels._native import available_isas
from tandem.kernels.formats import FORMATS, PackedMatrix, WeightFormat, find_format, unpack
from tandem.kernels.formats.native_quantize import _ROUNDED, Rounding, quantize_natively
from tandem.kernels.formats.packed import write_by_reference, write_weights
from tests.kernels.formats.sources import GRIDS, draw_weights
from tests.kernels.formats.test_layout import by_name

# The others come from files only, or only the reference quantises to them; grids are slow.
NATIVE = [fmt for fmt in FORMATS if fmt.kind in _ROUNDED and fmt not in GRIDS]
GROUPED = [fmt for fmt in NATIVE if fmt.group_size is not None]


def draw(
    rows: int,
    cols: int,
    seed: int,
    exponent: int,
    dtype: torch.dtype,
    every: int,
    is_transposed: bool,
) -> Tensor:
    """Return random weights (rows, cols) with the strides of checkpoint tensors."""
    weights = (draw_weights(rows * every, cols, seed) * 2.0**exponent).to(dtype)
    return (weights.T.contiguous().T if is_transposed else weights)[::every]


sources = st.builds(
    draw, st.integers(1, 70), st.integers(1, 300), st.integers(0, 2**32), st.integers(-40, 8),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.sampled_from([1, 2]),
    st.booleans(),
)  # fmt: skip


def packed_by(
    isa: str,
    weights: Tensor,
    fmt: WeightFormat,
    importance: Tensor | None = None,
    *,
    has_search: bool = True,
) -> PackedMatrix:
    packed = PackedMatrix.empty(weights.shape[0], weights.shape[1], fmt)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "best_isa", lambda: isa)
        rounding = Rounding(packed.blocks, fmt, weights, importance=importance)
        assert quantize_natively([rounding], has_search=has_search)
    return packed


def reference(
    weights: Tensor, fmt: WeightFormat, importance: Tensor | None = None, *, has_search: bool = True
) -> PackedMatrix:
    packed = PackedMatrix.empty(weights.shape[0], weights.shape[1], fmt)
    rounding = Rounding(packed.blocks, fmt, weights, importance=importance)
    write_by_reference(rounding, has_search=has_search)
    return packed


def assert_same(actual: PackedMatrix, expected: PackedMatrix) -> None:
    assert torch.equal(actual.data, expected.data)
    if expected.scales is not None and actual.scales is not None:
        assert torch.equal(actual.scales, expected.scales)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("fmt", NATIVE, ids=by_name)
@settings(max_examples=25)
@given(weights=sources)
def test_without_search_it_is_the_references(fmt: WeightFormat, isa: str, weights: Tensor) -> None:
    ours = packed_by(isa, weights, fmt, has_search=False)
    assert_same(ours, reference(weights, fmt, has_search=False))


@pytest.mark.parametrize("is_weighed", [False, True])
@pytest.mark.parametrize("fmt", GROUPED, ids=by_name)
@settings(max_examples=25)
@given(weights=sources)
def test_the_search_loses_what_the_references_loses(
    fmt: WeightFormat, is_weighed: bool, weights: Tensor
) -> None:
    width = fmt.padded_cols(weights.shape[1])
    importance = torch.zeros(width)
    importance[: weights.shape[1]] = 1 + is_weighed * torch.arange(weights.shape[1]) % 7
    ours = [packed_by(isa, weights, fmt, importance) for isa in available_isas()]
    for other in ours[1:]:
        assert_same(other, ours[0])
    square = importance[: weights.shape[1]].double()
    losses = [
        ((unpack(packed).double() - weights.double()).square() * square).sum()
        for packed in (ours[0], reference(weights, fmt, importance))
    ]
    # Sums have another order: near ties of two scales go either way. A weight's own square is
    # the possible error of a group's fp32 sums, times their precision.
    slack = 1e-6 * (weights.double().square() * square).sum()
    # From five bits on, rounding errors of sums and minima matter beside the remaining error.
    most = 1.05 if fmt.bits >= 5 else 1.003
    assert losses[0] <= most * losses[1] + slack


@pytest.mark.parametrize("fmt", GRIDS, ids=by_name)
def test_lines_are_the_references(fmt: WeightFormat) -> None:
    weights, importance = draw_weights(20, 300).bfloat16(), torch.zeros(512)
    importance[:300] = torch.rand(300, generator=torch.Generator().manual_seed(1))
    for weighed, has_search in [(None, False), (importance, True)]:
        expected = reference(weights, fmt, weighed, has_search=has_search)
        for isa in available_isas():
            assert_same(packed_by(isa, weights, fmt, weighed, has_search=has_search), expected)


@pytest.mark.parametrize("fmt", NATIVE, ids=by_name)
def test_threads_change_nothing(fmt: WeightFormat) -> None:
    weights = draw_weights(1100, 1000)
    one = packed_by(engine.best_isa(), weights, fmt)
    torch.set_num_threads(4)
    try:
        assert_same(packed_by(engine.best_isa(), weights, fmt), one)
    finally:
        torch.set_num_threads(1)


def test_other_dtypes_are_left_to_the_reference() -> None:
    fmt, weights = FORMATS[0], torch.ones(16, 8, dtype=torch.float64)
    packed = PackedMatrix.empty(16, 8, fmt)
    assert not quantize_natively([Rounding(packed.blocks, fmt, weights)])


def test_matrices_together_are_as_each_alone(tmp_path: Path) -> None:
    """Use several formats, tensors in memory and in a mapped file, with and without importance."""
    file = tmp_path / "weights"
    kept = draw_weights(700, 300).bfloat16()
    kept.view(torch.uint8).numpy().tofile(file)
    mapped = torch.from_file(str(file), size=kept.numel(), dtype=torch.bfloat16).view(700, 300)
    sources = [mapped, mapped[1::2], mapped.T, kept.float(), kept[:1]]
    jobs = []
    for number, (fmt, source) in enumerate(itertools.product(NATIVE, sources)):
        packed = PackedMatrix.empty(source.shape[0], source.shape[1], fmt)
        importance = torch.rand(fmt.padded_cols(source.shape[1])) if number % 3 == 0 else None
        jobs.append((packed, Rounding(packed.blocks, fmt, source, importance=importance)))
    assert quantize_natively([rounding for _, rounding in jobs])
    for packed, (_, fmt, source, _, importance) in jobs:
        assert_same(packed, packed_by(engine.best_isa(), source.clone(), fmt, importance))


def test_of_several_matrices_the_one_that_does_not_fit_is_named() -> None:
    fmt, good, bad = find_format("int4"), torch.ones(16, 32), torch.full((16, 32), float("nan"))
    packed = [PackedMatrix.empty(16, 32, fmt) for _ in range(3)]
    roundings = [
        Rounding(matrix.blocks, fmt, weight, name)
        for matrix, weight, name in zip(packed, (good, bad, good), "abc", strict=True)
    ]
    with pytest.raises(ModelError, match="b has weights that are NaN or infinite"):
        write_weights(roundings)

"""Tests of the Triton kernels on a real GPU: every format, activation and regime, also bf16."""

from collections.abc import Sequence

import pytest
import torch

from tandem.kernels.formats import FORMATS, find_format
from tandem.kernels.formats.weight_format import WeightFormat
from tandem.kernels.native import NativeActivation
from tests.gpu.models import DEVICE
from tests.kernels.triton_cases import ACTIVATIONS, SWIGLU, relative_error, sum_error

HIDDEN, INTERMEDIATE = 264, 200  # no multiple of a tile; fp8's 128 and int4z's padding too
FEW, SOME, MANY = (1, 2), (3, 8, 1), (1, 200, 65)


def error_of(
    fmt: WeightFormat,
    counts: Sequence[int],
    activation: NativeActivation | None = SWIGLU,
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Compute experts with this many tokens each on the GPU; return the relative error."""
    from tandem.triton_kernels.experts import TritonExperts

    return relative_error(
        TritonExperts(),
        fmt,
        counts,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        activation=activation,
        dtype=dtype,
        device=DEVICE,
    )


@pytest.mark.parametrize("counts", [FEW, MANY], ids=["vector", "matrix"])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_every_format_gives_what_the_reference_gives(
    fmt: WeightFormat, counts: tuple[int, ...]
) -> None:
    # Vector sums are fp32; the matrix units take weights and activations rounded to bf16.
    assert error_of(fmt, counts) < (1e-4 if counts is FEW else 8e-3)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("counts", [FEW, MANY], ids=["vector", "matrix"])
def test_every_activation_gives_what_the_reference_gives(
    activation: NativeActivation | None, counts: tuple[int, ...]
) -> None:
    assert error_of(find_format("int4"), counts, activation) < 8e-3


@pytest.mark.parametrize("counts", [SOME, (9, 16), (20, 30)], ids=str)
def test_every_size_of_tile_gives_what_the_reference_gives(counts: tuple[int, ...]) -> None:
    assert error_of(find_format("int4"), counts) < 8e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes_of_activations(dtype: torch.dtype) -> None:
    for counts in (FEW, MANY):
        assert error_of(find_format("int8"), counts, dtype=dtype) < (
            1e-5 if dtype == torch.float32 else 2e-3
        )


def test_rows_are_added_in_the_routers_order() -> None:
    from tandem.triton_kernels.experts import TritonExperts

    assert sum_error(TritonExperts(), 1500, device=DEVICE) < 1e-5

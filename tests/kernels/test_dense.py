"""Tests of packed dense matrices against torch: formats, shapes, token counts."""

import pytest
import torch

from tandem.hf.packed_layers import read_rows
from tandem.kernels._native import available_isas
from tandem.kernels.dense import (
    CpuThreads,
    DenseWeight,
    multiply,
    multiply_groups,
    pack_dense,
)
from tandem.kernels.formats.weight_format import FORMATS as PACKED_FORMATS
from tandem.kernels.formats.weight_format import find_format
from tests.kernels.formats.sources import pack_any

FORMATS = [
    "bf16",
    "fp16",
    "int8-g32",
    "int8-g128",
    "int4-g32",
    "int4z-g64",
    "mxfp4",
    "q4_k",
    "q6_k",
]


def weight_of(rows: int, cols: int, fmt: str, seed: int = 0, *, bias: bool = False) -> DenseWeight:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=random) / cols**0.5
    if find_format(fmt).encoding.grid is not None:
        return DenseWeight(pack_any(weight, find_format(fmt)), None)
    offset = torch.randn(rows, generator=random) if bias else None
    return pack_dense(weight, offset, find_format(fmt))


def expected(weight: DenseWeight, x: torch.Tensor) -> torch.Tensor:
    bias = None if weight.bias is None else weight.bias[: weight.out_features]
    return torch.nn.functional.linear(x.float(), weight.values(), bias)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_equal_torch_on_the_unpacked_weights(
    isa: str, fmt: str, dtype: torch.dtype
) -> None:
    threads = CpuThreads(num_threads=2, isa=isa)
    for rows, cols, tokens in [(64, 128, 1), (100, 96, 3), (33, 200, 5), (48, 64, 130)]:
        weight = weight_of(rows, cols, fmt, bias=rows == 100)
        x = torch.randn(tokens, cols, generator=torch.Generator().manual_seed(1)).to(dtype)
        (actual,) = multiply(threads, [weight], x)
        assert actual.dtype == dtype
        assert actual.shape == (tokens, rows)
        # int8 activations; bf16 rounds input or output.
        assert error(actual, expected(weight, x)) < (5e-3 if fmt in ("bf16", "fp16") else 0.015)


def test_several_matrices_share_an_input() -> None:
    threads = CpuThreads(num_threads=2)
    weights = [weight_of(rows, 128, "int8", seed=rows) for rows in (64, 16, 40)]
    x = torch.randn(2, 3, 128)
    together = multiply(threads, weights, x)
    for weight, actual in zip(weights, together, strict=True):
        assert actual.shape == (2, 3, weight.out_features)
        assert torch.equal(actual, multiply(threads, [weight], x)[0])


def test_a_row_does_not_depend_on_the_others_or_on_threads() -> None:
    weight, x = weight_of(300, 256, "int4"), torch.randn(257, 256)
    (many,) = multiply(CpuThreads(num_threads=2), [weight], x)
    (alone,) = multiply(CpuThreads(num_threads=1), [weight], x[200:201])
    assert torch.equal(many[200:201], alone)


def test_no_tokens_give_no_rows() -> None:
    (empty,) = multiply(CpuThreads(num_threads=2), [weight_of(32, 64, "int8")], torch.empty(0, 64))
    assert empty.shape == (0, 32)


@pytest.mark.parametrize("fmt", [fmt.name for fmt in PACKED_FORMATS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_by_number_are_those_of_the_unpacked_matrix(fmt: str, dtype: torch.dtype) -> None:
    threads = CpuThreads(num_threads=2)
    weight = weight_of(37, 256 if find_format(fmt).encoding.super_cols > 0 else 320, fmt)
    for numbers in (torch.tensor([36]), torch.tensor([[0, 5, 17], [17, 16, 1]]), torch.tensor([])):
        rows = read_rows(threads, weight, dtype, numbers.long())
        assert torch.equal(rows, weight.values().to(dtype)[numbers.long()])
    outside = read_rows(threads, weight, dtype, torch.tensor([37, -1]))
    assert outside.isnan().all()


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_group_has_its_own_product(isa: str, fmt: str, dtype: torch.dtype) -> None:
    threads = CpuThreads(num_threads=2, isa=isa)
    for groups, rows, cols, tokens in [
        (1, 16, 64, 1),
        (5, 48, 96, 1),
        (3, 20, 256, 7),
        (2, 32, 32, 0),
    ]:
        weights = [weight_of(rows, cols, fmt, seed=group) for group in range(groups)]
        random = torch.Generator().manual_seed(1)
        # A part of what lies side by side, and tokens that are further apart than groups.
        x = torch.randn(tokens, groups + 1, cols + 8, generator=random).to(dtype)[:, :-1, 8:]
        actual = multiply_groups(threads, weights, x)
        wanted = torch.stack([expected(w, x[:, i]) for i, w in enumerate(weights)], dim=1)
        assert actual.dtype == dtype
        assert actual.shape == (tokens, groups, rows)
        if tokens:
            assert error(actual, wanted) < (5e-3 if fmt in ("bf16", "fp16") else 0.015)
            assert torch.equal(multiply_groups(threads, weights, x[-1:]), actual[-1:])


@pytest.mark.skipif("amx" not in available_isas(), reason="this processor has no tiles")
def test_tiles_multiply_bf16_with_any_number_of_tokens() -> None:
    """Sums of even and of odd columns are added every 32 columns, as an instruction adds them."""
    threads = CpuThreads(num_threads=2, isa="amx")
    for rows, cols, tokens in [(64, 32, 1), (33, 200, 1), (48, 600, 17), (100, 520, 70)]:
        weight = weight_of(rows, cols, "bf16")
        x = torch.randn(tokens, cols, generator=torch.Generator().manual_seed(1)).bfloat16()
        products = x.float()[:, None] * weight.values().float()
        strips = torch.nn.functional.pad(products, (0, -cols % 32)).unflatten(-1, (-1, 16, 2))
        total = torch.zeros(tokens, rows)
        for strip in strips.unbind(2):
            even_and_odd = torch.zeros(tokens, rows, 2)
            for pair in strip.unbind(2):
                even_and_odd += pair
            total += even_and_odd.sum(-1)
        assert torch.equal(multiply(threads, [weight], x.float())[0], total)


def wild(*shape: int, seed: int, largest: float) -> torch.Tensor:
    """Return numbers whose products are about the smallest normal one, and some special ones."""
    random = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-72, -59, shape, generator=random)
    values = torch.randn(shape, generator=random) * 2.0**exponents
    special = torch.tensor([largest, -largest, 0.0, 2.0**-133, -(2.0**-127)])
    picked = special[torch.randint(len(special), shape, generator=random)]
    return torch.where(torch.rand(shape, generator=random) < 0.002, picked, values)


@pytest.mark.parametrize("isa", [isa for isa in available_isas() if isa in ("amx", "avx512")])
@pytest.mark.parametrize(("rows", "cols"), [(16, 32), (33, 200), (100, 520), (70, 2056)])
@pytest.mark.parametrize("kind", ["usual", "wild"])
def test_a_few_tokens_of_bf16_have_the_bits_of_many(
    isa: str, rows: int, cols: int, kind: str
) -> None:
    """Numbers below the normal ones, infinities and NaN too."""
    threads = CpuThreads(num_threads=2, isa=isa)
    if kind == "usual":
        weight = weight_of(rows, cols, "bf16", bias=True)
        x = torch.randn(40, cols, generator=torch.Generator().manual_seed(1))
    else:
        weight = pack_dense(wild(rows, cols, seed=0, largest=3e38), None, find_format("bf16"))
        x = wild(40, cols, seed=1, largest=torch.inf)
    (many,) = multiply(threads, [weight], x)
    for tokens in range(1, 9):
        (few,) = multiply(threads, [weight], x[:tokens])
        assert torch.equal(few.view(torch.int32), many[:tokens].view(torch.int32))

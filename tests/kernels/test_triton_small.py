"""Tests of norms, rotary embeddings and choices in Triton, interpreted, against torch."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.interpreter import interpreted_module

pytest.importorskip("triton")


operations = interpreted_module("tandem.triton_kernels.operations")


def expected_norm(x: Tensor, weight: Tensor | None, eps: float, rounds_first: bool) -> Tensor:
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    wide = wide.to(x.dtype).float() if rounds_first else wide
    return (wide if weight is None else wide * weight).to(x.dtype)


def near(dtype: torch.dtype) -> dict[str, Any]:
    return {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 4e-3, "atol": 1e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 1, 72), (2, 4, 1, 40)], ids=str)
def test_norms(operations: ModuleType, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    wide = torch.randn(*shape[:-1], 2 * shape[-1], generator=random).to(dtype)
    x, other = wide[..., : shape[-1]], torch.randn(shape, generator=random).to(dtype)
    weight = torch.rand(shape[-1], generator=random) + 0.5
    for given, rounds_first in ((weight, True), (weight, False), (None, False)):
        expected = expected_norm(x, given, 1e-6, rounds_first)
        found = operations.norm(x, given, 1e-6, rounds_first)
        torch.testing.assert_close(found, expected, **near(dtype))
        total, found = operations.add_and_norm(x, other, given, 1e-6, rounds_first)
        torch.testing.assert_close(total, x + other, **near(dtype))
        expected = expected_norm(x + other, given, 1e-6, rounds_first)
        torch.testing.assert_close(found, expected, **near(dtype))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rotary_embeddings(operations: ModuleType, heads: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    rows, dim = 3, 24

    def of_heads(count: int) -> Tensor:
        x = torch.randn(rows, 1, count, dim, generator=random).to(dtype)
        return x.transpose(1, 2) if heads == 1 else x

    x, other = of_heads(5), of_heads(2)
    cos, sin = torch.randn(2, rows, 1, dim, generator=random).to(dtype)

    def expected(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        turned = torch.cat((-high, low), -1)
        return x * cos[:, None] + turned * sin[:, None]

    torch.testing.assert_close(operations.rotate(x, cos, sin, heads), expected(x), **near(dtype))
    for found, source in zip(
        operations.rotate_two(x, other, cos, sin, heads), (x, other), strict=True
    ):
        torch.testing.assert_close(found, expected(source), **near(dtype))


@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (60, 4), (128, 8)])
def test_choices(operations: ModuleType, num_experts: int, top_k: int, is_normalised: bool) -> None:
    random = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, num_experts, generator=random)
    logits[0, 2] = logits[0, 5] = 20.0  # of equal ones the first
    weights, index = operations.choose(logits, top_k, 2.5, is_normalised, torch.float16)
    expected, chosen = logits.softmax(-1).topk(top_k)
    if is_normalised:
        expected = expected / expected.sum(-1, keepdim=True)
    assert index[0, :2].tolist() == [2, 5]
    assert index.dtype == torch.int64
    torch.testing.assert_close(index[1:], chosen[1:])
    torch.testing.assert_close(weights, (2.5 * expected).half(), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [1, 2])
def test_neighbours_that_heads_end_with_are_turned(
    operations: ModuleType, heads: int, dtype: torch.dtype
) -> None:
    """DeepSeek-V4 rotates only the last 6 of 20 values in pairs of neighbours."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 3, 40, generator=random).to(dtype)[..., ::2][:, :, :, :20]
    x = x if heads == 1 else x.transpose(1, 2)
    angles = torch.randn(2, 3, 3, generator=random)
    cos, sin = angles.cos(), angles.sin()
    turns = torch.complex(cos, sin).unsqueeze(heads)
    pairs = torch.view_as_complex(x[..., 14:].float().unflatten(-1, (3, 2)).contiguous())
    expected = torch.cat([x[..., :14], torch.view_as_real(pairs * turns).flatten(-2).to(dtype)], -1)
    found = operations.rotate_pairs(x, cos, sin, heads)
    torch.testing.assert_close(found, expected, **near(dtype))
    assert torch.equal(found[..., :14], x[..., :14])

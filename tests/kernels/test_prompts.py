"""What a prompt is computed with where that is not what steps are: tiles of bf16, on AMX.

Elsewhere a prompt's products are those of steps, and these tests hold as well.
"""

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.kernels._native import available_isas
from tandem.kernels.dense import CpuThreads, DenseWeight, multiply
from tandem.kernels.engine import as_prompt
from tandem.kernels.formats import FORMATS
from tandem.kernels.formats.weight_format import find_format
from tests.kernels.formats.sources import pack_any
from tests.kernels.layers import make_layer, relative_error
from tests.kernels.test_dense import error, expected, weight_of

TOKENS = (0, 1, 7, 8, 16, 17, 64)
HAS_TILES = "amx" in available_isas()


@functools.cache
def threads_of(isa: str = "") -> CpuThreads:
    return CpuThreads(num_threads=2, isa=isa)


@functools.cache
def all_weights() -> dict[str, DenseWeight]:
    """Return a matrix of each format: rows and columns are no whole blocks, tiles or panels."""
    weight = torch.randn(72, 600, generator=torch.Generator().manual_seed(3)) / 600**0.5
    bias = torch.randn(80, generator=torch.Generator().manual_seed(4))
    return {fmt.name: DenseWeight(pack_any(weight, fmt), bias) for fmt in FORMATS}


def tokens_of(count: int) -> Tensor:
    return torch.randn(64, 600, generator=torch.Generator().manual_seed(5))[:count]


@pytest.mark.parametrize("fmt", [fmt.name for fmt in FORMATS])
def test_a_prompts_products_equal_torch_and_do_not_depend_on_its_cuts(fmt: str) -> None:
    weight = all_weights()[fmt]
    with as_prompt():
        (whole,) = multiply(threads_of(), [weight], tokens_of(64))
        for count in TOKENS:
            assert torch.equal(multiply(threads_of(), [weight], tokens_of(count))[0], whole[:count])
        assert torch.equal(multiply(threads_of(), [weight], tokens_of(64)[40:])[0], whole[40:])
    assert error(whole, expected(weight, tokens_of(64))) < (0.004 if HAS_TILES else 0.015)


@pytest.mark.parametrize("fmt", ["int8-g128", "int4-g32", "int4z-g128", "q4_k", "q6_k", "mxfp4"])
def test_a_prompts_products_lose_no_more_than_those_of_steps(fmt: str) -> None:
    weight, x = all_weights()[fmt], tokens_of(64)
    (of_step,) = multiply(threads_of(), [weight], x)
    with as_prompt():
        (of_prompt,) = multiply(threads_of(), [weight], x)
    wanted = expected(weight, x)
    assert error(of_prompt, wanted) <= error(of_step, wanted)


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp8", "int4-g32", "int8-g128", "q2_k", "iq3_s"])
def test_a_prompts_experts_equal_the_reference(fmt: str) -> None:
    rows = [list(range(n)) for n in TOKENS]
    layer = make_layer(find_format(fmt), 200, 72, rows, has_bias=True)
    with as_prompt():
        found = layer.compute(threads_of().engine)
        alone = replace(layer, rows=[r[:1] for r in rows]).compute(threads_of().engine)
    wanted = layer.expected(is_rounded=False)
    assert relative_error(found[1:], wanted[1:]) < (0.01 if HAS_TILES else 0.03)
    for of_all, of_one in zip(found[1:], alone[1:], strict=True):
        assert torch.equal(of_all[:1], of_one)


def test_only_the_thread_that_says_so_computes_a_prompt_and_only_inside() -> None:
    weight, x = weight_of(64, 256, "int4"), torch.randn(20, 256)
    (before,) = multiply(threads_of(), [weight], x)
    with as_prompt():
        with as_prompt():
            (inside,) = multiply(threads_of(), [weight], x)
        assert torch.equal(multiply(threads_of(), [weight], x)[0], inside)
    assert torch.equal(multiply(threads_of(), [weight], x)[0], before)
    assert torch.equal(before, inside) is not HAS_TILES


@pytest.mark.skipif(not HAS_TILES, reason="no AMX")
def test_the_instruction_set_without_tiles_computes_prompts_as_steps() -> None:
    weight, x = weight_of(64, 256, "q4_k"), torch.randn(20, 256)
    (of_step,) = multiply(threads_of("avx512"), [weight], x)
    with as_prompt():
        assert torch.equal(multiply(threads_of("avx512"), [weight], x)[0], of_step)

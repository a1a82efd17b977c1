"""Tests of the attention of prompts' tokens in Triton, interpreted against torch."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.kernels.attention import AttentionForm, Segment
from tandem.kv_cache.attention_call import AttentionCall
from tandem.kv_cache.cuda.cache import StaticKvCache
from tandem.kv_cache.cuda.layers import DecodeKernels
from tests.kernels.attention_cases import VARIANTS, form_of, tokens
from tests.kernels.interpreter import interpreted_module

pytest.importorskip("triton")
CPU = torch.device("cpu")

triton_attention = interpreted_module("tandem.triton_kernels.decode_attention")


@pytest.fixture(scope="module")
def kernels(triton_attention: ModuleType) -> DecodeKernels:
    """Attention for a GPU with twelve multiprocessors."""
    found: DecodeKernels = triton_attention.DecodeAttention(12)
    return found


def of_a_prompt(
    kernels: DecodeKernels | None,
    form: AttentionForm,
    counts: list[int],
    size: int,
    *,
    kv_dtype: str = "auto",
    dtype: torch.dtype = torch.float32,
    has_sinks: bool = False,
) -> list[Tensor]:
    """Return what the parts of a prompt attend to, in the second of two slots.

    With kernels each part after the first is a step of `size` tokens.
    """
    random = torch.Generator().manual_seed(1)
    sinks = torch.linspace(-1, 2, form.num_heads).to(dtype) if has_sinks else None
    cache = StaticKvCache(2, 1, CPU, kv_dtype=kv_dtype, kernels=kernels)
    found = []
    for number, count in enumerate(counts):
        parts = tokens(form, count, dtype, random, "cpu")
        if kernels is None or not number:
            cache.begin(Segment(1, cache.lengths[1], count))
        else:
            assert cache.takes_prompt_steps
            cache.begin_prompt_step(1, count, size)
            padding = tokens(form, size - count, dtype, torch.Generator().manual_seed(2), "cpu")
            query, key, value = (torch.cat(both, 1) for both in zip(parts, padding, strict=True))
            parts = query, key, value
        cache.expect(0)
        found.append(cache.attend(AttentionCall(form, *parts, sinks))[:count])
        cache.commit()
        assert (cache.lengths[1], cache.prompt_lengths[1]) == (sum(counts[: number + 1]),) * 2
    return found[1:]


def require_same(kernels: DecodeKernels, *given: Any, most: float = 1e-5, **more: Any) -> None:
    expected, found = (of_a_prompt(each, *given, **more) for each in (None, kernels))
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).norm()) <= most * float(theirs.norm())


@pytest.mark.parametrize(
    ("form", "counts", "size"),
    [
        (form_of(1, 1, 16, 16), [1, 16, 3], 16),
        (form_of(8, 2, 64, 64), [3, 70, 50], 128),
        (form_of(6, 3, 80, 48), [100, 17], 32),  # groups of two heads
        (form_of(10, 2, 32, 32), [7, 33], 64),  # of five
        (form_of(40, 1, 16, 160), [9, 5], 16),  # more heads than a program has rows
    ],
    ids=lambda value: (
        f"{value.num_heads}-{value.key_dim}" if isinstance(value, AttentionForm) else str(value)
    ),
)
def test_what_torch_gives_whatever_shapes_and_lengths(
    kernels: DecodeKernels, form: AttentionForm, counts: list[int], size: int
) -> None:
    require_same(kernels, form, counts, size)


@pytest.mark.parametrize("more", VARIANTS, ids=str)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_windows_softcaps_and_sinks(
    kernels: DecodeKernels, more: dict[str, Any], has_sinks: bool
) -> None:
    form = form_of(8, 2, 32, 32, **more)
    require_same(kernels, form, [110, 30, 2], 32, has_sinks=has_sinks)


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "most"),
    [("int8", torch.float32, 2e-3), ("bf16", torch.float32, 4e-3), ("auto", torch.float16, 2e-3)],
)
def test_keys_and_values_of_other_dtypes(
    kernels: DecodeKernels, kv_dtype: str, dtype: torch.dtype, most: float
) -> None:
    more: dict[str, Any] = {"kv_dtype": kv_dtype, "dtype": dtype, "has_sinks": True}
    require_same(kernels, form_of(8, 2, 64, 32), [90, 50], 64, most=most, **more)


def test_small_tiles(triton_attention: ModuleType) -> None:
    kernels = triton_attention.DecodeAttention(12, has_small_tiles=True)
    require_same(kernels, form_of(4, 2, 288, 300), [70, 20], 32)

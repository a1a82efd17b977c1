"""Tests of attention with windows and compressed keys in Triton, interpreted, against torch."""

from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tandem.kernels.attention import AttentionForm, Segment
from tandem.kernels.device_states import Run
from tandem.kv_cache.attention_call import AttentionCall, NewCompressed
from tandem.kv_cache.cuda.layers import DecodeKernels, StepPlaces
from tandem.kv_cache.cuda.windows import DeviceWindows
from tests.kernels.attention_cases import form_of
from tests.kernels.interpreter import interpreted_module

pytest.importorskip("triton")
CPU = torch.device("cpu")
LENGTH = 512  # positions whose keys torch looks at


triton_attention = interpreted_module("tandem.triton_kernels.decode_attention")


class Case(NamedTuple):
    """A layer, and the positions of a step's tokens."""

    form: AttentionForm
    ratio: int = 0
    most_chosen: int = 0
    lengths: tuple[int, ...] = (0, 300)
    tokens_each: int = 1
    kv_dtype: str = "auto"
    dtype: torch.dtype = torch.float32
    has_sinks: bool = True
    num_processors: int = 12
    """Determines the number of parts of the positions; 1: one part."""


def steps_of(case: Case, windows: DeviceWindows) -> list[Tensor]:
    """Return the outputs of prompts of some lengths and of two steps after them."""
    form, random = case.form, torch.Generator().manual_seed(1)
    sinks = torch.linspace(-1, 2, form.num_heads).to(case.dtype) if case.has_sinks else None
    windows.reserve(LENGTH, 0)

    def call(count: int) -> AttentionCall:
        def some(heads: int) -> Tensor:
            made = torch.randn(count, heads, form.key_dim, generator=random)
            return made.to(case.dtype).transpose(0, 1)

        query, key, compressed = some(form.num_heads), some(1), some(1)
        new = NewCompressed(case.ratio, compressed, None) if case.ratio else None
        return AttentionCall(form, query, key, key[..., :0], sinks, None, new)

    for slot, length in enumerate(case.lengths):
        if length:
            windows.of_prompt(0, Segment(slot, 0, length), call(length))
    results = []
    for step in range(2):
        each = range(step, step + case.tokens_each)
        slots = [slot for slot, _ in enumerate(case.lengths) for _ in each]
        positions = [length + i for length in case.lengths for i in each]
        places = StepPlaces(len(slots), CPU)
        places.upload(slots, positions, [Run(0, 0, 0, 0)] * len(slots), [0] * len(slots))
        given = call(len(slots))
        if case.most_chosen:
            given = given._replace(selected=chosen_of(case, positions, random))
        results.append(windows.of_step(0, places, LENGTH, given))
    return results


def chosen_of(case: Case, positions: list[int], random: torch.Generator) -> Tensor:
    """Return some of the keys that end before each position, unordered and with gaps."""
    rows = []
    for position in positions:
        numbers = torch.randperm((position + 1) // case.ratio, generator=random)
        row = torch.full((case.most_chosen,), -1)
        row[: len(numbers)] = numbers[: case.most_chosen]
        row[:40] = -1  # more than a block
        rows.append(row)
    return torch.stack(rows)


def require_same(kernels: DecodeKernels, case: Case, most: float = 1e-5) -> None:
    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    expected, found = (
        steps_of(case, DeviceWindows(len(case.lengths), zeros, case.kv_dtype, each))
        for each in (None, kernels)
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == case.dtype
        assert float((ours - theirs).norm() / theirs.norm()) < most


@pytest.mark.parametrize(
    "case",
    [
        Case(form_of(20, 1, 16, window=7)),
        Case(form_of(20, 1, 24, window=128), ratio=3, has_sinks=False),
        Case(form_of(3, 1, 16, window=5), ratio=128, lengths=(126, 3), tokens_each=4),
        Case(form_of(20, 1, 32, window=128), ratio=4, most_chosen=72, lengths=(1, 300)),
        Case(form_of(8, 1, 16, window=9), ratio=2, most_chosen=72, tokens_each=4, num_processors=1),
    ],
    ids=["a window", "all keys", "few keys", "chosen keys", "drafts"],
)
def test_what_torch_gives_in_windows(triton_attention: ModuleType, case: Case) -> None:
    require_same(triton_attention.DecodeAttention(case.num_processors), case)


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "most"),
    [
        ("int8", torch.float32, 2e-3),  # ties may be rounded to the other side
        ("bf16", torch.float32, 4e-3),  # the interpreter cuts off where others round
        ("auto", torch.float16, 2e-3),
        ("int8", torch.float16, 4e-3),
    ],
)
def test_keys_of_other_dtypes(
    triton_attention: ModuleType, kv_dtype: str, dtype: torch.dtype, most: float
) -> None:
    kernels = triton_attention.DecodeAttention(4, has_small_tiles=kv_dtype == "bf16")
    form = form_of(20, 1, 64, window=40)
    case = Case(form, ratio=4, lengths=(90, 2), kv_dtype=kv_dtype, dtype=dtype)
    require_same(kernels, case, most)

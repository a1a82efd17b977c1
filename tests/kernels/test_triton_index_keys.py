"""Tests of the indexer's selection by Triton's kernels, interpreted, against torch."""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tandem.kernels.attention import Segment
from tandem.kernels.device_states import Run
from tandem.kv_cache.cuda.index_keys import DeviceIndexKeys
from tandem.kv_cache.cuda.layers import DecodeKernels, StepPlaces
from tandem.kv_cache.index_keys import NewIndexKeys, Selection
from tests.kernels.interpreter import interpreted_module

pytest.importorskip("triton")
CPU = torch.device("cpu")
LENGTH = 512  # positions of a slot at most

triton_attention = interpreted_module("tandem.triton_kernels.decode_attention")


class Case(NamedTuple):
    """An indexer, and the positions of a step's tokens."""

    heads: int
    dim: int
    block: int
    most: int
    lengths: tuple[int, ...]
    """The lengths of the slots before the step."""
    tokens_each: int = 1
    length: int = LENGTH
    dtype: torch.dtype = torch.float32
    grid: float = 0.0
    """Keys and queries are multiples of this, so that many scores are equal."""
    damaged: float | None = None
    """A value, such as NaN, to write into one key."""


def kept_by(case: Case, kernels: DecodeKernels | None) -> tuple[DeviceIndexKeys, NewIndexKeys]:
    index_keys = DeviceIndexKeys(
        len(case.lengths), lambda shape, dtype: torch.zeros(shape, dtype=dtype), kernels
    )
    index_keys.reserve(LENGTH, 0)
    return index_keys, NewIndexKeys(0, Selection.of_keys(0.3, case.most, case.block))


Inputs = Callable[[int], tuple[Tensor, Tensor, Tensor]]


def inputs_of(case: Case) -> Inputs:
    """Return the inputs for key, query and weights of this many tokens."""
    random = torch.Generator().manual_seed(1)

    def some(*shape: int) -> Tensor:
        made = torch.randn(*shape, generator=random)
        made = (made / case.grid).round() * case.grid if case.grid else made
        return made.to(case.dtype)

    def inputs(count: int) -> tuple[Tensor, Tensor, Tensor]:
        weights = some(count, case.heads).float()
        return some(count, case.dim), some(count, 2 * case.heads, case.dim)[:, ::2], weights

    return inputs


def selected(case: Case, kernels: DecodeKernels | None) -> list[Tensor]:
    """Return each token's selection in two steps after prompts: sorted numbers, -1 first."""
    (index_keys, new), inputs = kept_by(case, kernels), inputs_of(case)
    for slot, length in enumerate(case.lengths):
        if length:
            index_keys.of_prompt(new, Segment(slot, 0, length), *inputs(length))
    if case.damaged is not None:
        index_keys._layers[0, case.block][:, 3, 0] = case.damaged
    found = []
    for step in range(2):
        each = range(step, step + case.tokens_each)
        slots = [slot for slot, _ in enumerate(case.lengths) for _ in each]
        positions = [length + i for length in case.lengths for i in each]
        places = StepPlaces(len(slots), CPU)
        places.upload(slots, positions, [Run(0, 0, 0, 0)] * len(slots), [0] * len(slots))
        rows = torch.tensor(slots)
        numbers = index_keys.of_step(new, places, rows, case.length, *inputs(len(slots)))
        found.append(numbers.sort().values)
    return found


@pytest.mark.parametrize(
    "case",
    [
        Case(4, 16, 4, 9, (0, 3, 300)),
        Case(20, 24, 3, 5, (11, 200), tokens_each=4),  # drafts: each sees those before it
        Case(4, 16, 4, 40, (0, 100), length=128),  # all are seen
        Case(3, 16, 2, 30, (255,), grid=1.0, dtype=torch.bfloat16),  # of equal scores the first
        Case(2, 16, 2, 6, (70,), damaged=float("nan")),
        Case(2, 16, 2, 6, (70,), damaged=float("-inf")),
        Case(1, 16, 1, 3, (40,), grid=4.0),  # most scores are zeros, of either sign
    ],
    ids=["slots", "drafts", "all", "equal", "no number", "infinite", "zeros"],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # it is meant
def test_what_torch_selects(
    triton_attention: ModuleType, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem.triton_kernels import selected_keys  # interpreted now

    monkeypatch.setattr(selected_keys, "_BLOCK_SCORES", 32)  # several for a token
    expected, found = selected(case, None), selected(case, triton_attention.DecodeAttention(4))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.tolist() == theirs.tolist()


def seen_in_prompts(case: Case, kernels: DecodeKernels | None) -> list[Tensor]:
    """Return the selections of each slot's prompt tokens, and of one token after them."""
    (index_keys, new), inputs = kept_by(case, kernels), inputs_of(case)
    found = []
    for slot, length in enumerate(case.lengths):
        found.append(index_keys.of_prompt(new, Segment(slot, 0, length), *inputs(length)))
        if case.damaged is not None:
            index_keys._layers[0, case.block][slot, 3, 0] = case.damaged
        found.append(index_keys.of_prompt(new, Segment(slot, length, 35), *inputs(35)))
    return found


@pytest.mark.parametrize(
    "case",
    [
        Case(4, 16, 4, 9, (1, 67), dtype=torch.bfloat16),
        Case(4, 16, 4, 40, (20,)),  # all are seen
        Case(3, 24, 2, 12, (41,), grid=1.0),  # of equal scores the first
        Case(2, 16, 2, 6, (33,), damaged=float("nan")),
        Case(2, 16, 2, 6, (33,), damaged=float("-inf")),
        Case(1, 16, 1, 3, (20,), grid=4.0),
    ],
    ids=["slots", "all", "equal", "no number", "infinite", "zeros"],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_prompts_see_what_torch_selects(
    triton_attention: ModuleType, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts run piece by piece, as the memory for scores allows."""
    from tandem.triton_kernels import selected_keys

    monkeypatch.setattr(selected_keys, "_BLOCK_SCORES", 32)
    monkeypatch.setattr(selected_keys, "_MOST_SCORES", 700)
    kernels = triton_attention.DecodeAttention(4)
    expected, found = seen_in_prompts(case, None), seen_in_prompts(case, kernels)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)

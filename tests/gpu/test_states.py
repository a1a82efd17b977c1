"""Tests of convolutions and recurrences on a real GPU, against torch, also in bf16."""

from typing import Any

import pytest
import torch

from tandem.decode.cuda.slots import CudaSlotPool, new_cuda_slot_pool
from tandem.kernels.device_states import Run, SlotTokens, StateMemory, TorchStates, logged_values
from tandem.kernels.recurrent import (
    MOST_DRAFTED,
    Convolution,
    Recurrence,
    RecurrenceForm,
    StateOperation,
)
from tests.gpu.models import DEVICE, IS_DRY, compare_logits, load_hybrid
from tests.hf.tiny import save_tiny_checkpoint

FORMS = [
    RecurrenceForm(32, 16, 128, 128, "head", is_delta=True, is_normalised=True, scale=128**-0.5),
    RecurrenceForm(8, 8, 128, 128, "key", is_delta=True, is_normalised=True, scale=128**-0.5),
    RecurrenceForm(64, 8, 128, 64, "head"),
    RecurrenceForm(1, 1, 16, 4096, "pair"),
]


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).float().norm() / expected.float().norm()) < 0.02


def near_runs(found: torch.Tensor, expected: torch.Tensor, tokens: SlotTokens) -> None:
    """Compare the outputs of tokens, without padding."""
    for _, first, count, *_ in tokens.runs.tolist():
        near(found[first : first + count], expected[first : first + count])


def memory_of(operation: StateOperation, states: torch.Tensor) -> StateMemory:
    shape = len(states), 2, MOST_DRAFTED, logged_values(operation)
    return StateMemory(states.clone(), torch.zeros(shape, device=DEVICE))


def steps_of(num_each: int) -> list[SlotTokens]:
    """Return two slots' tokens: certain ones, drafted ones, then some of these and other ones."""
    found, drafted = [], min(num_each - 1, MOST_DRAFTED)
    for certain, again, half in ((num_each, (-1, 0), 0), (1, (0, 0), 0), (1, (2, 0), 1)):
        count = num_each if certain == num_each else 1 + drafted
        runs = [
            Run(1 + n, n * num_each, count, certain, min(again[n], drafted), half) for n in range(2)
        ]
        found.append(SlotTokens(torch.tensor(runs, device=DEVICE), count))
    return found


@pytest.mark.skipif(IS_DRY, reason="needs the Triton kernels")
@pytest.mark.parametrize("num_each", [1, 8, 700])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.decay}-{form.num_heads}")
def test_recurrences_give_what_torch_gives(form: RecurrenceForm, num_each: int) -> None:
    from tandem.triton_kernels.states import TritonStates

    random = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=DEVICE).bfloat16()

    count = 2 * num_each
    keys = (count, form.num_key_heads, form.key_dim)
    fading = {
        "head": (count, form.num_heads),
        "key": (count, form.num_heads, form.key_dim),
        "pair": (count, form.value_dim),
    }[form.decay]
    inputs = [draw(count, form.num_heads, form.value_dim), draw(*keys), draw(*keys)]
    decay = draw(*fading).float().abs()
    rates = [] if form.decay == "pair" else [draw(count, form.num_heads).sigmoid()]
    is_pair = form.decay == "pair"
    factor = -draw(form.value_dim, form.key_dim).float().abs() if is_pair else None
    given = (*inputs, decay if is_pair else -decay, *rates)
    operation = Recurrence(form, None if factor is None else factor.t().contiguous().t())
    shape = (3, form.num_heads, form.key_dim, form.value_dim)
    states = torch.randn(shape, generator=random, device=DEVICE)
    ours, theirs = (memory_of(operation, states) for _ in range(2))
    for tokens in steps_of(num_each):
        out = TritonStates().recur(operation, ours, tokens, *given)
        near_runs(out, TorchStates().recur(operation, theirs, tokens, *given), tokens)
        near(ours.states, theirs.states)


@pytest.mark.skipif(IS_DRY, reason="needs the Triton kernels")
@pytest.mark.parametrize("num_each", [1, 8, 700])
def test_convolutions_give_what_torch_gives(num_each: int) -> None:
    from tandem.triton_kernels.states import TritonStates

    random = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(2 * num_each, 8192, generator=random, device=DEVICE).bfloat16()
    weight = torch.randn(4, 8192, generator=random, device=DEVICE).t()
    states = torch.randn(3, 3, 8192, generator=random, device=DEVICE)
    operation = Convolution(weight, None, has_silu=True)
    ours, theirs = (memory_of(operation, states) for _ in range(2))
    for tokens in steps_of(num_each):
        out = TritonStates().convolve(operation, ours, tokens, x)
        near_runs(out, TorchStates().convolve(operation, theirs, tokens, x), tokens)
        assert torch.equal(ours.states, theirs.states)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "nemotron_h", "lfm2_moe"])
def test_slots_go_back_to_checkpoints_and_on(tmp_path: Any, name: str) -> None:
    directory = save_tiny_checkpoint(tmp_path / name, name)
    model = load_hybrid(directory, "float32", tmp_path, decode_graph=False)
    text = [40 + i * 7 % 80 for i in range(200)]
    pool: CudaSlotPool = new_cuda_slot_pool(model, 2, has_replay=True)
    pool.prefill({0: text})
    for step in range(8):
        pool.decode({0: 50 + step})
    assert pool.step.is_replaying, pool.step.why_not
    usable = pool.usable(0, 199)
    assert usable == 192
    pool.keep(0, usable)
    again = pool.prefill({0: text[usable:]}).clone()
    divergence, _ = compare_logits(again, pool.prefill({1: text}))
    assert divergence <= 2e-2

"""Convolutions and recurrences on a GPU: in torch, and in Triton's interpreter, Transformers' own.

The interpreter cuts bf16 off where others round, so its results are further away.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.jamba import modeling_jamba as jamba
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from tandem.kernels.device_states import (
    Run,
    SlotTokens,
    StateKernels,
    StateMemory,
    TorchStates,
    logged_values,
)
from tandem.kernels.recurrent import MOST_DRAFTED, Convolution, Recurrence, RecurrenceForm
from tests.kernels.interpreter import interpreted
from tests.kernels.test_recurrent import close, delta_inputs, draw, rows_of

SLOTS = 3


@pytest.fixture(scope="module", params=["torch", "triton"])
def kernels(request: pytest.FixtureRequest) -> Iterator[StateKernels]:
    if request.param == "torch":
        yield TorchStates()
        return
    pytest.importorskip("triton")
    with interpreted():
        from tandem.triton_kernels.states import TritonStates

        yield TritonStates()


class OneSlot:
    """An operation with the states of some slots, of which the middle one gets tokens."""

    def __init__(self, kernels: StateKernels, operation: Convolution | Recurrence) -> None:
        self._kernels, self._operation = kernels, operation
        if isinstance(operation, Convolution):
            channels, width = operation.weight.shape
            shape: tuple[int, ...] = (width - 1, channels)
        else:
            form = operation.form
            shape = (form.num_heads, form.key_dim, form.value_dim)
        self.states = torch.full((SLOTS, *shape), 7.0)  # a state of zeros begins by itself
        log = torch.full((SLOTS, 2, MOST_DRAFTED, logged_values(operation)), 7.0)
        self.memory = StateMemory(self.states, log)

    def __call__(self, inputs: list[Tensor], first: int) -> Tensor:
        count = len(inputs[0])
        return self.step([Run(1, 0, count, count, 0 if first else -1)], inputs)

    def step(self, runs: list[Run], inputs: list[Tensor]) -> Tensor:
        tokens = SlotTokens(torch.tensor(runs), max(run.num_tokens for run in runs))
        if isinstance(self._operation, Convolution):
            return self._kernels.convolve(self._operation, self.memory, tokens, *inputs)
        return self._kernels.recur(self._operation, self.memory, tokens, *inputs)

    def in_parts(self, inputs: list[Tensor], cuts: list[int]) -> Tensor:
        parts = zip([0, *cuts], [*cuts, len(inputs[0])], strict=True)
        return torch.cat([self([x[first:end] for x in inputs], first) for first, end in parts])


def require(
    kernels: StateKernels,
    operation: Convolution | Recurrence,
    inputs: list[Tensor],
    expected: Tensor,
    cuts: list[int],
) -> None:
    """Require what is expected, in one call and in several, and that other slots are left alone."""
    whole, parts = OneSlot(kernels, operation), OneSlot(kernels, operation)
    found = whole.in_parts(inputs, [])
    close(found, expected, dtype=expected.dtype)
    close(parts.in_parts(inputs, cuts), found)
    close(parts.states[1], whole.states[1])
    assert (whole.states[::2] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_silu", [True, False])
@pytest.mark.parametrize(("channels", "width"), [(136, 4), (64, 3), (7, 2)])
def test_convolutions(
    kernels: StateKernels, channels: int, width: int, *, has_silu: bool, dtype: torch.dtype
) -> None:
    weight, bias = draw(channels, width, seed=1), draw(channels, seed=2)
    x = draw(18, channels, dtype=dtype)
    activation = "silu" if has_silu else None
    expected = qwen.causal_conv1d_fn(
        x.t()[None], weight.to(dtype), bias.to(dtype), activation=activation
    )[0].t()
    weight, bias = (numbers.to(dtype).float() for numbers in (weight, bias))
    operation = Convolution(weight.t().contiguous().t(), bias, has_silu)
    require(kernels, operation, [x], expected, [1, 3, 4, 17])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 4, 16, 16), (1, 1, 128, 24), (2, 2, 33, 20)])
def test_the_gated_delta_rule(
    kernels: StateKernels, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    num_keys, num_values, key_dim, value_dim = shape
    inputs = delta_inputs(20, num_keys, num_values, key_dim, value_dim, dtype)
    spread = {k: inputs[k].repeat_interleave(num_values // num_keys, 2) for k in ("query", "key")}
    expected, _ = qwen.torch_chunk_gated_delta_rule(
        **{**inputs, **spread}, chunk_size=8,
        initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    form = RecurrenceForm(
        num_values, num_keys, key_dim, value_dim, "head",
        is_delta=True, is_normalised=True, scale=key_dim**-0.5,
    )  # fmt: skip
    require(kernels, Recurrence(form), rows_of(inputs), expected[0], [1, 7])


def test_kimis_delta_attention(kernels: StateKernels) -> None:
    inputs = delta_inputs(20, 3, 3, 32, 24, torch.float32)
    inputs["g"] = -draw(1, 20, 3, 32, seed=4).abs()
    expected, _ = kimi.recurrent_kimi_delta_attention(
        **inputs, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    form = RecurrenceForm(
        3, 3, 32, 24, "key", is_delta=True, is_normalised=True, scale=32**-0.5
    )  # fmt: skip
    require(kernels, Recurrence(form), rows_of(inputs), expected[0], [2])


def test_mamba_2(kernels: StateKernels) -> None:
    x, dt = draw(1, 20, 6, 24), draw(1, 20, 6, seed=1).exp()
    a, skip = -draw(6, seed=2).abs(), draw(6, seed=3)
    b, c = draw(1, 20, 2, 16, seed=4), draw(1, 20, 2, 16, seed=5)
    expected: Any = nemotron.mamba2_chunk_scan(x, dt, a, b, c, chunk_size=4, D=skip)
    operation = Recurrence(
        RecurrenceForm(6, 2, 16, 24, "head"), skip=skip[:, None].expand(6, 24).contiguous()
    )
    require(kernels, operation, [x[0], c[0], b[0], (dt * a)[0], dt[0]], expected[0], [3])


def test_mamba(kernels: StateKernels) -> None:
    x, dt = draw(1, 40, 20), draw(1, 40, 20, seed=1).exp()
    a, b, c = -draw(40, 16, seed=2).abs(), draw(1, 16, 20, seed=4), draw(1, 16, 20, seed=5)
    expected: Any = jamba.mamba_selective_scan(x, dt, a, b, c)
    operation = Recurrence(RecurrenceForm(1, 1, 16, 40, "pair"), a.t().contiguous().t())
    value, query, key, rate = (part[0].t().contiguous() for part in (x * dt, c, b, dt))
    inputs = [value[:, None], query[:, None], key[:, None], rate]
    require(kernels, operation, inputs, expected[0].t()[:, None], [5, 6])


def test_slots_go_on_side_by_side_and_idle_ones_stay(kernels: StateKernels) -> None:
    """A step of three rows: a slot begins, one goes on, and a row has no token."""
    form = RecurrenceForm(2, 1, 16, 16, "head", is_delta=True)
    inputs = rows_of(delta_inputs(SLOTS, 1, 2, 16, 16, torch.float32))
    convolution = Convolution(draw(4, 8, seed=1).t(), None, True)
    for operation, given in ((Recurrence(form), inputs), (convolution, [draw(SLOTS, 8)])):
        alone, together = OneSlot(kernels, operation), OneSlot(kernels, operation)
        before = together.states.normal_(generator=torch.Generator().manual_seed(0)).clone()
        runs = [Run(0, 0, 1, 1), Run(1, 1, 1, 1, 0), Run(0, 2, 1, 0)]
        out = together.step(runs, given)
        assert torch.equal(together.states[2], before[2])
        assert out.isfinite().all()
        for slot, position in ((0, 0), (1, 9)):
            alone.states[1] = before[slot]
            expected = alone([x[slot : slot + 1] for x in given], position)
            close(out[slot : slot + 1], expected)
            close(together.states[slot], alone.states[1])


OPERATIONS: dict[str, Convolution | Recurrence] = {
    "delta": Recurrence(RecurrenceForm(4, 2, 16, 24, "head", is_delta=True, is_normalised=True)),
    "by key": Recurrence(RecurrenceForm(2, 2, 33, 16, "key", is_delta=True)),
    "skip": Recurrence(RecurrenceForm(2, 1, 16, 16, "head"), skip=draw(2, 16, seed=3)),
    "pair": Recurrence(RecurrenceForm(1, 1, 16, 40, "pair"), -draw(16, 40, seed=2).abs().t()),
    "convolution": Convolution(draw(4, 24, seed=1).t(), None, has_silu=True),
}


def tokens_for(operation: Convolution | Recurrence, count: int) -> list[Tensor]:
    """Inputs of so many tokens."""
    if isinstance(operation, Convolution):
        return [draw(count, len(operation.weight))]
    form = operation.form
    shape = {
        "head": (form.num_heads,), "key": (form.num_heads, form.key_dim), "pair": (form.value_dim,)
    }[form.decay]  # fmt: skip
    decay = draw(count, *shape, seed=7).abs()
    keys = [draw(count, form.num_key_heads, form.key_dim, seed=n) for n in (5, 6)]
    rates = [] if form.decay == "pair" else [draw(count, form.num_heads, seed=8).sigmoid()]
    value = draw(count, form.num_heads, form.value_dim)
    return [value, *keys, decay if form.decay == "pair" else -decay, *rates]


@pytest.mark.parametrize("name", OPERATIONS)
def test_drafted_tokens_that_are_taken_back_leave_nothing(kernels: StateKernels, name: str) -> None:
    """Two slots write texts in steps of random drafts, of which the first few are kept."""
    operation, length, chance = OPERATIONS[name], 14, random.Random(3)
    texts = {
        slot: [x.flip(0) if slot else x for x in tokens_for(operation, length)] for slot in (0, 2)
    }
    expected = {slot: OneSlot(kernels, operation)(text, 0) for slot, text in texts.items()}
    pool = OneSlot(kernels, operation)
    done, again, half = {0: 0, 2: 0}, {0: -1, 2: -1}, {0: 0, 2: 0}
    while min(done.values()) < length:
        runs, rows, row = [], [], 0
        for slot in [n for n in texts if done[n] < length]:
            count = min(chance.randrange(1, 6), length - done[slot])
            runs.append(Run(slot, row, count, 1, again[slot], half[slot]))
            rows.append([x[done[slot] : done[slot] + count] for x in texts[slot]])
            row += count
        runs.append(Run(runs[0].slot, row, 1, 0, -1, runs[0].half))
        inputs = [
            torch.cat([*of_tokens, of_tokens[0][:1]]) for of_tokens in zip(*rows, strict=True)
        ]
        out = pool.step(runs, inputs)
        assert out.isfinite().all()
        for run in runs[:-1]:
            first, kept = done[run.slot], chance.randrange(1, run.num_tokens + 1)
            found = out[run.first : run.first + run.num_tokens]
            close(found, expected[run.slot][first : first + run.num_tokens])
            done[run.slot] += kept
            again[run.slot] = kept - 1
            half[run.slot] ^= run.num_tokens > 1
    assert (pool.states[1] == 7).all()
    assert (pool.memory.log[1] == 7).all()

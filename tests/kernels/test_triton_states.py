"""Tests of convolutions and recurrences on a GPU: torch and interpreted Triton, by Transformers.

The interpreter truncates bf16 where others round, so its results differ more.
"""

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tandem.kernels.device_compression import compress_prompt, ring_shape
from tandem.kernels.device_states import (
    Run,
    SlotTokens,
    StateKernels,
    StateMemory,
    TorchStates,
    logged_values,
)
from tandem.kernels.recurrent import (
    MOST_DRAFTED,
    Compression,
    Convolution,
    Recurrence,
    RecurrenceForm,
)
from tests.kernels.interpreter import interpreted
from tests.kernels.layers import draw
from tests.kernels.test_recurrent import (
    Rule,
    close,
    convolution,
    delta_inputs,
    gated_delta,
    kimi_delta,
    mamba,
    mamba_2,
    rows_of,
)

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
    """An operation with the states of some slots; the middle slot gets tokens."""

    def __init__(self, kernels: StateKernels, operation: Convolution | Recurrence) -> None:
        self._kernels, self._operation = kernels, operation
        if isinstance(operation, Convolution):
            channels, width = operation.weight.shape
            shape: tuple[int, ...] = (width - 1, channels)
        else:
            form = operation.form
            shape = (form.num_heads, form.key_dim, form.value_dim)
        self.states = torch.full((SLOTS, *shape), 7.0)  # a state of zeros starts automatically
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


def require(kernels: StateKernels, rule: Rule, cuts: list[int]) -> None:
    """Assert the expected results in one call and in several, and unchanged other slots."""
    operation = rule.operation
    if isinstance(operation, Convolution):  # channels side by side, in fp32
        bias = None if operation.bias is None else operation.bias.float()
        weight = operation.weight.float().t().contiguous().t()
        operation = operation._replace(weight=weight, bias=bias)
    elif operation.factor is not None:
        operation = operation._replace(factor=operation.factor.t().contiguous().t())
    whole, parts = OneSlot(kernels, operation), OneSlot(kernels, operation)
    found = whole.in_parts(rule.inputs, [])
    close(found, rule.expected, dtype=rule.expected.dtype)
    close(parts.in_parts(rule.inputs, cuts), found)
    close(parts.states[1], whole.states[1])
    assert (whole.states[::2] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_silu", [True, False])
@pytest.mark.parametrize(("channels", "width"), [(136, 4), (64, 3), (7, 2)])
def test_convolutions(
    kernels: StateKernels, channels: int, width: int, *, has_silu: bool, dtype: torch.dtype
) -> None:
    rule = convolution(18, channels, width, has_silu=has_silu, dtype=dtype)
    require(kernels, rule, [1, 3, 4, 17])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 4, 16, 16), (1, 1, 128, 24), (2, 2, 33, 20)])
def test_the_gated_delta_rule(
    kernels: StateKernels, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    require(kernels, gated_delta(20, shape, dtype), [1, 7])


@pytest.mark.parametrize(
    ("make_rule", "cuts"), [(kimi_delta, [2]), (mamba_2, [3]), (mamba, [5, 6])]
)
def test_other_rules(kernels: StateKernels, make_rule: Callable[[], Rule], cuts: list[int]) -> None:
    require(kernels, make_rule(), cuts)


def test_slots_go_on_side_by_side_and_idle_ones_stay(kernels: StateKernels) -> None:
    """A step of three tokens: one slot begins, one continues, and one token is padding."""
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
    """Return inputs of this many tokens."""
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
    """Two slots decode random drafts and keep the first few of each step."""
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


@pytest.mark.parametrize(("ratio", "dim", "num_series"), [(4, 24, 2), (3, 130, 2), (6, 17, 1)])
def test_windows_become_keys_wherever_a_step_begins(
    kernels: StateKernels, ratio: int, dim: int, num_series: int
) -> None:
    """Steps have up to eight tokens of one slot; some of them are taken back."""
    count, width = 22, num_series * dim
    operation = Compression(draw(ratio, width, seed=3), num_series)
    tokens = [[draw(count, width, seed=n) for n in (slot, slot + 2)] for slot in range(2)]
    zeros = torch.zeros(3, *ring_shape(operation))
    expected = [compress_prompt(operation, zeros[2].clone(), 0, *x) for x in tokens]
    rings, lengths = zeros.clone(), [0, 5]
    compress_prompt(operation, rings[1], 0, *[x[:5] for x in tokens[1]])
    random.seed(4)
    while max(lengths) <= count - 8:
        counts = [random.randint(0, 7), random.randint(1, 8)]
        rows = [(s, lengths[s] + i) for s in (1, 0) for i in range(counts[s])]
        idle = (0, lengths[0] + counts[0])
        inputs = [torch.stack([tokens[s][i][p] for s, p in [*rows, idle, idle]]) for i in range(2)]
        slots, positions = torch.tensor([*rows, idle, idle]).T.contiguous()
        found = kernels.compress(operation, rings, slots, positions, *inputs)
        for (slot, position), key in zip(rows, found, strict=False):
            torch.testing.assert_close(key, expected[slot][position], rtol=1e-5, atol=1e-5)
        lengths = [n + random.randint(0, c) for n, c in zip(lengths, counts, strict=True)]
    assert torch.equal(rings[2], zeros[2])

"""Tests that each small operation of a recorded step is one native call with torch's result."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.recording.test_program import recorded_graph_of

pytestmark = pytest.mark.every_isa

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(0, 8), (1, 8), (3, 1), (5, 1, 2, 33), (2, 3, 1, 2, 1500)]
Step = Callable[[Tensor], Tensor]

ONE_BY_ONE: dict[str, Step] = {
    "activations": lambda x: F.silu(x) + torch.sigmoid(x) * F.softplus(x) - F.relu(x),
    "gelu": lambda x: F.gelu(x) * F.gelu(x * 3, approximate="tanh"),
    "exponentials": lambda x: torch.exp(x) - torch.log(x.abs() + 1) + torch.log1p(x.square()),
    "angles": lambda x: torch.sin(x * 100) + torch.cos(x * 1000) * torch.tanh(x),
    "roots": lambda x: torch.sqrt(x.abs()) + torch.rsqrt(x * x + 1) - torch.reciprocal(x.abs() + 1),
    "powers": lambda x: x.pow(2) + x.abs().pow(0.5) + x.pow(3) + torch.floor(x * 3),
    "two tensors": lambda x: torch.maximum(x, x.flip(-1) * 0) / (x.abs() + 0.5) - (-x),
    "numbers": lambda x: (1 - x) / 4 + 2 * x - 1,
    "limits": lambda x: x.clamp(-0.5, 0.5) + x.clamp(min=0.1) * x.clamp(max=0.2),
    "limits of tensors": lambda x: torch.clamp(x, -x.abs() / 2, x.abs() / 3),
    "a choice of two": lambda x: torch.where(x > 0.3, x, x * 2).masked_fill(x < -1, 7.0),
    "truths": lambda x: ((x >= 0) & ~(x > 1) | (x == 0) | (x != x)).to(x.dtype) + (x <= 1),
    "casts": lambda x: x.float().to(torch.bfloat16).to(x.dtype),
    "in place": lambda x: (x + 0).mul_(2).add_(1).masked_fill_(x > 0, 3.0).div_(x.abs() + 1),
    "views in place": lambda x: _halves_written(x),
}


def _halves_written(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    half = x.shape[-1] // 2
    out[..., :half].copy_(x[..., half : 2 * half])
    out[..., half : 2 * half] += x[..., :half]
    return out


def near(actual: Tensor, expected: Tensor) -> bool:
    if expected.dtype == torch.bool:
        return torch.equal(actual, expected)
    tolerance = 1e-5 if expected.dtype == torch.float32 else 1e-2
    difference = (actual.float() - expected.float()).norm()
    return bool(difference <= tolerance * expected.float().norm() + 1e-7)


def check(step: Step, x: Tensor, *, num_calls: int | None = 1) -> None:
    recorded = recorded_graph_of(lambda: step(x), [x])
    assert num_calls in (None, recorded.num_calls), [op.name for op, _ in recorded.profile(1)]
    for _ in range(2):
        x.normal_()
        with torch.inference_mode():
            actual, expected = recorded.run(), step(x)
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape
        assert near(actual, expected), (actual - expected).abs().max()


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(ONE_BY_ONE.keys() - {"two tensors"}))
def test_value_by_value(name: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x = torch.randn(shape).to(dtype)
        check(ONE_BY_ONE[name], x, num_calls=1 if len(x) else None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_tensors_of_other_strides(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 6).to(dtype)
    check(lambda x: torch.maximum(x[..., ::2], x[:, :1, 1::2]) / x[0, 0, 1].abs(), x)
    check(lambda x: x.transpose(0, 2) - x.permute(2, 1, 0)[:, 1:2], x)
    check(lambda x: torch.minimum(x, x[:1].expand(3, 4, 6)), x)


def test_many_values_are_cut_for_the_threads() -> None:
    check(lambda x: F.silu(x) * x[:1], torch.randn(3, 70_001))
    check(lambda x: x.T.contiguous() + 1, torch.randn(700, 300))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (2, 3, 1, 40), (2, 1, 5, 1, 1500)])
def test_along_a_dimension(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    for dim in range(-1, len(shape) - 1):
        check(lambda x, d=dim: x.sum(d) / 3, x)  # type: ignore[misc]
        check(lambda x, d=dim: x.mean(d, keepdim=True), x)  # type: ignore[misc]
        check(lambda x, d=dim: x.amax(d) - x.amin(d), x)  # type: ignore[misc]
        check(lambda x, d=dim: torch.linalg.vector_norm(x, dim=d), x)  # type: ignore[misc]
    check(lambda x: x.softmax(-1, dtype=torch.float32), x)
    check(lambda x: x[..., ::2].softmax(-1), x)
    weight, bias = torch.randn(2, shape[-1]).to(dtype)
    check(lambda x: F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6), x)
    check(lambda x: F.layer_norm(x, x.shape[-1:]), torch.randn(2, 9).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_greatest(dtype: torch.dtype) -> None:
    x = torch.randn(3, 2, 40).to(dtype)
    check(lambda x: x.gather(-1, x.max(-1, keepdim=True).indices), x)
    check(lambda x: x.topk(5, dim=-1).values.cumsum(-1), x, num_calls=2)
    check(lambda x: x[..., 1::2].topk(7, sorted=False).values.sum(-1), x)
    check(lambda x: torch.zeros_like(x).scatter(-1, x.topk(3).indices, -1.0), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_by_number(dtype: torch.dtype) -> None:
    table, numbers = torch.randn(50, 1100).to(dtype), torch.tensor([[3, 49], [0, 3]])
    x = torch.randn(50, 9).to(dtype)
    check(lambda x: F.embedding(numbers, table) * x[0, 0], x)
    check(lambda x: table[:, 0][numbers] + x[:, 0][numbers], x)
    check(lambda x: x.gather(0, numbers), x)
    experts = torch.randint(1 << 40, (50, 6))  # whole numbers, which fp32 would round
    check(lambda x: torch.where(experts[numbers[0]] == experts[[3, 49]], 1.0, x[:2, :6]), x)
    few = numbers % 9
    check(lambda x: (x + 0).scatter_(1, few, x[:2, :2] * 2), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies(dtype: torch.dtype) -> None:
    x = torch.randn(3, 1, 4, 6).to(dtype)
    check(lambda x: torch.stack((x[..., ::2], -x[..., 1::2]), dim=-1).flatten(-2), x)
    check(lambda x: torch.cat((x, x[..., :0], x[..., 3:]), dim=-1), x)
    check(lambda x: x.repeat_interleave(2, dim=-1) + x.repeat(1, 1, 1, 2), x)
    check(lambda x: x.repeat(2, 3, 1, 1, 2), x)
    check(lambda x: x.transpose(1, 2).reshape(3, 24) * 1.5, x)
    check(lambda x: x.permute(3, 2, 1, 0).contiguous().clone(), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5])
def test_products(dtype: torch.dtype, rows: int) -> None:
    x = torch.randn(rows, 2, 4, 6).to(dtype)
    weight, bias = torch.randn(9, 6).to(dtype), torch.randn(9).to(dtype)
    check(lambda x: x @ x.transpose(-1, -2), x)
    check(lambda x: (x.transpose(-1, -2) @ x)[..., 1:], x)
    check(lambda x: F.linear(x, weight, bias), x)
    check(lambda x: F.linear(x.transpose(1, 2)[..., :3], weight[:, ::2]), x)
    wide = torch.randn(200, 1500).to(dtype) / 40
    check(lambda x: F.linear(x, wide), torch.randn(rows, 1500).to(dtype))


def test_what_is_not_a_number_stays_so() -> None:
    x = torch.tensor([[1.0, float("nan"), -1.0, float("inf")]])
    for step in (F.silu, torch.relu, torch.tanh, lambda x: x.clamp(-1, 1)):
        recorded = recorded_graph_of(lambda f=step: f(x), [x])  # type: ignore[misc]
        torch.testing.assert_close(recorded.run(), step(x), equal_nan=True)


def test_constants_that_are_written_are_made_anew() -> None:
    x = torch.randn(3)

    def step(x: Tensor) -> Tensor:
        total = torch.zeros(3)
        total[1:] += x[1:]
        return total

    check(step, x)


def test_a_tensor_that_python_makes_in_each_step_is_a_constant() -> None:
    check(lambda x: x @ torch.tensor([1.0, 2.0]).expand(4, 2), torch.randn(3, 4))


def test_whole_numbers_that_fp32_cannot_hold_stay_torchs() -> None:
    numbers = torch.tensor([(1 << 24) + 1, 5])
    recorded = recorded_graph_of(lambda: numbers + 1, [numbers])
    assert recorded.run().tolist() == [(1 << 24) + 2, 6]
    joined = recorded_graph_of(lambda: torch.cat((numbers, numbers.flip(0)[::2])), [numbers])
    assert joined.run().tolist() == [(1 << 24) + 1, 5, 5]


def test_what_repeats_is_done_once() -> None:
    positions = torch.tensor([[3], [70_000]])

    def step(x: Tensor) -> Tensor:
        for _ in range(5):  # as Mistral Large 4 scales each layer's queries
            x = x * (1 + 0.1 * torch.log((positions + 1).float()))
        return x

    x = torch.randn(2, 8)
    recorded = recorded_graph_of(lambda: step(x), [x, positions])
    assert [op.name for op, _ in recorded.profile(1)].count("log") == 1
    positions += 7
    torch.testing.assert_close(recorded.run(), step(x))


def test_what_is_written_in_between_is_done_again() -> None:
    def step(x: Tensor) -> Tensor:
        before = x * 2
        total = before + 1
        before.add_(total)
        return total + (before + 1)

    check(step, torch.randn(3, 4))

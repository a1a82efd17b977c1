"""Tests of operations that are fused into native ones: equal values, no torch calls left."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tandem.hf.packed_layers import PackedLinear
from tandem.kernels.dense import pack_dense
from tandem.kernels.formats.weight_format import find_format
from tandem.recording.recorded_graph import RecordedGraph
from tests.conftest import two_threads
from tests.recording.test_program import norm, recorded_graph_of

pytestmark = pytest.mark.every_isa

ROWS, HEADS, DIM = 3, 4, 16
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    """bf16 sometimes makes two logits equal, and then another token may be chosen."""
    torch.manual_seed(0)


def linear(in_features: int, out_features: int, dtype: torch.dtype) -> PackedLinear:
    weight = torch.randn(out_features, in_features) / in_features**0.5
    return PackedLinear(pack_dense(weight, None, find_format("bf16")), two_threads(), dtype)


def check(
    step: Callable[[], Tensor], x: Tensor, *, num_calls: int = 1, **inputs: Tensor
) -> RecordedGraph:
    """Record a step, and compare its graph with it for other input values."""
    recorded = recorded_graph_of(step, [x, *inputs.values()])
    chance = torch.Generator().manual_seed(1)  # values without a tie at the edge of a choice
    for _ in range(2):
        x.normal_(generator=chance)
        with torch.inference_mode():
            actual, expected = recorded.run(), step()
        tolerance = 2e-3 if expected.dtype == torch.float32 else 2e-2
        assert (actual - expected).norm() <= tolerance * expected.norm()
    assert recorded.num_calls == num_calls, [op.name for op, _ in recorded.profile(1)]
    return recorded


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_of_a_slice(dtype: torch.dtype) -> None:
    layer, x = linear(DIM, 3 * DIM, dtype), torch.randn(ROWS, 1, DIM).to(dtype)
    weight = torch.rand(DIM).to(dtype)
    check(lambda: norm(layer(x).split([DIM, 2 * DIM], -1)[0], weight), x)


def test_the_norm_of_rows_that_are_not_evenly_apart_is_done_step_by_step() -> None:
    layer, x = linear(DIM, 2 * DIM, torch.float32), torch.randn(ROWS, 2, 3, DIM)
    weight = torch.rand(DIM)
    recorded = check(lambda: norm(layer(x)[:, :, ::2, :DIM], weight), x)
    assert "rsqrt" in [operation.name for operation, _ in recorded.profile(1)]


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("is_normalised", [True, False])
def test_a_routers_choice_with_a_factor(is_sorted: bool, is_normalised: bool) -> None:
    layer, x = linear(DIM, 24, torch.float32), torch.randn(ROWS, DIM)
    nothing = torch.zeros(ROWS, 24)

    def step() -> Tensor:
        scores = layer(x).softmax(-1, dtype=torch.float32)
        weights, experts = torch.topk(scores, k=5, dim=-1, sorted=is_sorted)
        if is_normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * 2.5
        return nothing.scatter(1, experts, weights)

    recorded = check(step, x)
    assert [op.name for op, _ in recorded.profile(1)] == ["dense", "topk", "scatter"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, ROWS])
def test_rotary_embeddings_of_pairs(dtype: torch.dtype, rows: int) -> None:
    layer, x = linear(DIM, HEADS * 2 * DIM, dtype), torch.randn(rows, 1, DIM).to(dtype)
    turns = torch.polar(torch.ones(rows, 1, DIM // 2), torch.randn(rows, 1, DIM // 2))

    def step() -> Tensor:
        heads = layer(x).view(rows, 1, HEADS, 2 * DIM).transpose(1, 2)[..., DIM:]
        numbers = torch.view_as_complex(heads.float().reshape(*heads.shape[:-1], -1, 2))
        return torch.view_as_real(numbers * turns.unsqueeze(1)).flatten(3).type_as(heads)

    check(step, x, turns=turns, num_calls=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_that_are_joined(dtype: torch.dtype) -> None:
    layer, x = linear(DIM, HEADS * DIM, dtype), torch.randn(ROWS, 1, DIM).to(dtype)
    shared = linear(DIM, DIM, dtype)

    def step() -> Tensor:
        heads = layer(x).view(ROWS, 1, HEADS, DIM).transpose(1, 2)
        one = shared(x).view(ROWS, 1, 1, DIM).expand(-1, HEADS, -1, -1)
        filled = heads.new_empty(ROWS, HEADS, 1, 2 * DIM)
        filled[..., :DIM] = heads
        filled[..., DIM:] = one
        return torch.cat((one, filled, heads), dim=-1)

    check(step, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embeddings_half_by_half(dtype: torch.dtype) -> None:
    """The form of gpt-oss: views, and tables repeated for all heads."""
    layer, x = linear(DIM, HEADS * DIM, dtype), torch.randn(ROWS, 1, DIM).to(dtype)
    cos, sin = torch.randn(2, ROWS, 1, 1, DIM // 2).to(dtype)

    def step() -> Tensor:
        first, second = layer(x).view(ROWS, 1, HEADS, DIM).transpose(1, 2).chunk(2, dim=-1)
        turned = first * cos - second * sin, second * cos + first * sin
        return torch.cat(turned, dim=-1)

    check(step, x, cos=cos, sin=sin)


def test_values_with_gaps_numbers_and_gates() -> None:
    layer, x = linear(DIM, 2 * DIM, torch.float32), torch.randn(ROWS, DIM)
    gate = linear(DIM, 1, torch.float32)

    def step() -> Tensor:
        hidden = layer(x)
        return torch.sigmoid(gate(x)) * (hidden[:, ::2] * 0.5 - hidden[:, 1::2]) + 1.0

    check(step, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_choice_before_its_softmax(dtype: torch.dtype) -> None:
    layer, x = linear(DIM, 24, dtype), torch.randn(ROWS, DIM).to(dtype)
    nothing = torch.zeros(ROWS, 24, dtype=dtype)

    def step() -> Tensor:
        weights, experts = torch.topk(layer(x), 5, dim=-1)
        return nothing.scatter(1, experts, weights.softmax(-1, dtype=dtype))

    check(step, x)


@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("has_sum", [True, False])
@pytest.mark.parametrize("filling", [float("-inf"), 0.0])
def test_a_choice_by_ranks(num_groups: int, has_sum: bool, filling: float) -> None:
    """The form of DeepSeek-V3: biased scores, the best two groups of four, the largest.

    Where the other groups' scores are zero and not minus infinity, they beat negative ones.
    """
    num_experts, top_k = 24, 5
    layer, x = linear(DIM, num_experts, torch.float32), torch.randn(ROWS, DIM)
    bias, nothing = torch.randn(num_experts) - 1, torch.zeros(ROWS, num_experts)

    def step() -> Tensor:
        scores = layer(x).sigmoid()
        ranks = scores + bias
        if num_groups > 1:
            sums = ranks.view(-1, num_groups, num_experts // num_groups).topk(2, dim=-1)[0].sum(-1)
            kept = torch.topk(sums, k=2, dim=-1, sorted=False)[1]
            mask = torch.zeros_like(sums)
            mask.scatter_(1, kept, 1)
            wide = mask.unsqueeze(-1).expand(-1, num_groups, num_experts // num_groups)
            ranks = ranks.masked_fill(~wide.reshape(-1, num_experts).bool(), filling)
        experts = torch.topk(ranks, k=top_k, dim=-1, sorted=False)[1]
        weights = scores.gather(1, experts)
        if has_sum:
            weights /= weights.sum(-1, keepdim=True) + 1e-20
            weights = weights * 2.5
        return nothing.scatter(1, experts, weights)

    if num_groups == 1 or filling < 0:
        check(step, x)
    else:
        recorded = recorded_graph_of(step, [x])
        x.normal_()
        torch.testing.assert_close(recorded.run(), step(), atol=2e-3, rtol=1e-3)


def test_a_choice_by_ranks_with_weights_in_bf16() -> None:
    """The form of LFM2: biases in fp32, scores in the model's dtype."""
    layer, x = linear(DIM, 24, torch.bfloat16), torch.randn(ROWS, DIM).bfloat16()
    bias, nothing = torch.randn(24), torch.zeros(ROWS, 24, dtype=torch.bfloat16)

    def step() -> Tensor:
        scores = layer(x).sigmoid()
        experts = torch.topk(scores + bias, k=4, dim=-1)[1]
        weights = scores.gather(1, experts)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-6) * 1.5
        return nothing.scatter(1, experts, weights)

    check(step, x)


def test_a_result_that_is_read_too_early_is_not_replaced() -> None:
    layer, x = linear(DIM, 8, torch.float32), torch.randn(ROWS, DIM)

    def step() -> Tensor:
        weights, experts = torch.topk(layer(x).softmax(-1), 2)
        first = experts.float()
        return weights * 2.0 + first

    recorded = recorded_graph_of(step, [x])
    x.normal_()
    torch.testing.assert_close(recorded.run(), step(), atol=2e-3, rtol=1e-3)


def test_memory_that_is_filled_in_part_stays_torchs() -> None:
    layer, x = linear(DIM, DIM, torch.float32), torch.randn(ROWS, DIM)

    def step() -> Tensor:
        hidden = layer(x)
        filled = hidden.new_zeros(ROWS, 2 * DIM)
        filled[..., :DIM] = hidden
        return layer(filled[..., DIM:] + filled[..., :DIM])

    recorded = recorded_graph_of(step, [x])
    x.normal_()
    torch.testing.assert_close(recorded.run(), step(), atol=2e-3, rtol=1e-3)


def test_a_cast_of_a_native_result() -> None:
    layer, x = linear(DIM, DIM, torch.bfloat16), torch.randn(ROWS, DIM).bfloat16()
    recorded = check(lambda: layer(x).float(), x)
    assert recorded.run().dtype == torch.float32

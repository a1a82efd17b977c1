"""Tests of the CPU executor against the sum that defines a MoE layer, token by token."""

import pytest
import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.experts.execution import executor as executor_module
from tandem.experts.execution.batch import ExpertFunctions
from tandem.experts.execution.executor import CpuExecutor
from tandem.experts.store.host_store import HostStore
from tandem.experts.tracing.events import ExpertStatistics
from tandem.kernels.formats.weight_format import find_format
from tandem.kernels.reference import expert_ffn

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 5, 8, 6, 2
FUNCTIONS = ExpertFunctions(activate=torch.relu)
SHAPES: dict[str, tuple[int, ...]] = {
    "up_proj": (EXPERTS, INTERMEDIATE, HIDDEN),
    "down_proj": (EXPERTS, HIDDEN, INTERMEDIATE),
}


@pytest.fixture
def executor() -> CpuExecutor:
    torch.manual_seed(0)
    store = HostStore()
    layer = store.add_layer("mlp.experts", SHAPES, expert_dtype=None)
    for name, shape in SHAPES.items():
        layer.put(name, torch.randn(shape))
    return CpuExecutor(store)


def route(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(num_tokens)
    index = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(num_tokens)]) if (
        num_tokens
    ) else torch.empty(0, TOP_K, dtype=torch.int64)  # fmt: skip
    return torch.randn(num_tokens, HIDDEN), index, torch.rand(num_tokens, TOP_K)


def definition(executor: CpuExecutor, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(hidden)
    for token in range(len(hidden)):
        for k in range(index.shape[1]):
            if 0 <= (expert := int(index[token, k])) < EXPERTS:
                row = expert_ffn(
                    hidden[token, None], executor.store[0].weights(expert), FUNCTIONS.activate
                )
                out[token] += weights[token, k] * row[0]
    return out


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 40])
def test_result_is_the_weighted_sum_of_experts(executor: CpuExecutor, num_tokens: int) -> None:
    hidden, index, weights = route(num_tokens)
    actual = executor.execute(0, hidden, index, weights, FUNCTIONS)
    torch.testing.assert_close(actual, definition(executor, hidden, index, weights))


def test_padding_ids_add_nothing(executor: CpuExecutor) -> None:
    hidden, index, weights = route(6)
    index[0, 0], index[3] = EXPERTS, torch.tensor([-1, EXPERTS + 7])
    actual = executor.execute(0, hidden, index, weights, FUNCTIONS)
    torch.testing.assert_close(actual, definition(executor, hidden, index, weights))
    assert torch.equal(actual[3], torch.zeros(HIDDEN))


def test_long_prompts_in_chunks_give_the_same_rows(
    executor: CpuExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, index, weights = route(40)
    whole = executor.execute(0, hidden, index, weights, FUNCTIONS)
    monkeypatch.setattr(executor_module, "MAX_TOKENS_AT_ONCE", 7)
    torch.testing.assert_close(executor.execute(0, hidden, index, weights, FUNCTIONS), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_keeps_the_dtype_of_its_input(executor: CpuExecutor, dtype: torch.dtype) -> None:
    hidden, index, weights = route(3)
    actual = executor.execute(0, hidden.to(dtype), index, weights, FUNCTIONS)
    assert actual.dtype == dtype
    expected = definition(executor, hidden, index, weights)
    torch.testing.assert_close(actual.float(), expected, rtol=0.05, atol=0.1)


def test_events_count_what_was_read(executor: CpuExecutor) -> None:
    statistics = ExpertStatistics()
    executor.listeners.append(statistics)
    hidden, _, weights = route(3)
    index = torch.tensor([[0, 1], [1, 2], [0, 2]])
    executor.execute(0, hidden, index, weights, FUNCTIONS)
    expert_bytes = 2 * HIDDEN * INTERMEDIATE * 4
    assert statistics == ExpertStatistics(
        touched_bytes=3 * expert_bytes,
        active_experts=3,
        expert_rows=6,
        separate_bytes=6 * expert_bytes,
    )


def test_a_layer_with_experts_missing_is_refused() -> None:
    layer = HostStore().add_layer("mlp.experts", SHAPES, expert_dtype=None)
    layer.put("down_proj", torch.zeros(SHAPES["down_proj"]))
    for expert in range(EXPERTS - 1):
        layer.put_expert("up_proj", expert, [torch.zeros(INTERMEDIATE, HIDDEN)])
    with pytest.raises(ModelError, match=r"4 of 5 experts of mlp\.experts\.up_proj"):
        layer.arrivals.require_complete()


def test_tensors_of_another_shape_are_refused() -> None:
    layer = HostStore().add_layer("mlp.experts", SHAPES, expert_dtype=None)
    with pytest.raises(ModelError, match=r"has shape \(5, 3\), but config\.json asks for"):
        layer.put("down_proj", torch.zeros(5, 3))


def test_parts_of_an_expert_are_stacked_in_order() -> None:
    layer = HostStore().add_layer("mlp.experts", SHAPES, expert_dtype=torch.bfloat16)
    gate, up = torch.ones(2, HIDDEN), 2 * torch.ones(INTERMEDIATE - 2, HIDDEN)
    layer.put_expert("up_proj", 3, [gate, up])
    stored = layer.stored()["up_proj"][3]
    assert torch.equal(stored.float(), torch.cat([gate, up]))
    assert stored.dtype == torch.bfloat16


def test_gate_and_up_that_come_apart_are_packed_as_if_joined() -> None:
    shapes: dict[str, tuple[int, ...]]
    shapes = {"gate_up_proj": (1, 2 * INTERMEDIATE, 32), "down_proj": (1, 32, INTERMEDIATE)}
    random = torch.Generator().manual_seed(0)
    gate, up = torch.randn(2, INTERMEDIATE, 32, generator=random)
    stored = []
    for parts in ([gate, up], [torch.cat([gate, up])], [gate[:1], gate[1:], up]):
        layer = HostStore().add_layer("mlp.experts", shapes, expert_dtype=find_format("int4"))
        layer.put_expert("gate_up_proj", 0, parts)
        stored.append(layer.stored()["experts"])
    assert torch.equal(stored[0], stored[1])
    assert torch.equal(stored[0], stored[2])


@pytest.mark.parametrize("name", ["int4", "bf16", "int5"])  # the last by the reference
@pytest.mark.parametrize("is_transposed", [False, True])
def test_experts_together_are_packed_as_one_by_one(name: str, is_transposed: bool) -> None:
    tensors = {
        "gate_up_proj": torch.randn(3, 2 * INTERMEDIATE, 32),
        "down_proj": torch.randn(3, 32, INTERMEDIATE),
        "gate_up_proj_bias": torch.randn(3, 2 * INTERMEDIATE),
        "down_proj_bias": torch.randn(3, 32),
    }
    if is_transposed:
        tensors |= {n: t.mT.contiguous() for n, t in tensors.items() if not n.endswith("bias")}
    shapes = {n: tuple(t.shape) for n, t in tensors.items()}
    layers = [
        HostStore().add_layer(
            "mlp.experts", shapes, expert_dtype=find_format(name), is_transposed=is_transposed
        )
        for _ in range(2)
    ]
    for tensor_name, fused in tensors.items():
        layers[0].put(tensor_name, fused)
        for expert, tensor in enumerate(fused):
            layers[1].put_expert(tensor_name, expert, [tensor])
    assert torch.equal(layers[0].stored()["experts"], layers[1].stored()["experts"])
    layers[0].arrivals.require_complete()

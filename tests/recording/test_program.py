"""Tests that programs do what their operations do one by one, with reused memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tandem.hf.packed_layers import PackedLinear
from tandem.kernels.dense import pack_dense
from tandem.kernels.formats.weight_format import find_format
from tandem.recording.program import NativeCall
from tandem.recording.recorded_graph import RecordedGraph
from tandem.recording.recorder import Recorder
from tests.conftest import two_threads

pytestmark = pytest.mark.every_isa

SIZE = 64


def linear(seed: int, dtype: torch.dtype) -> PackedLinear:
    weight = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed)) / 8
    return PackedLinear(pack_dense(weight, None, find_format("bf16")), two_threads(), dtype)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * scaled.to(x.dtype)


def layers(x: Tensor, linears: list[PackedLinear], weight: Tensor) -> Tensor:
    """A stack with residuals, gates, views, and operations that only torch has."""
    first = x * 2  # read again at the end: its memory may not be reused before
    hidden = first
    for i in range(0, len(linears), 3):
        normed = norm(hidden, weight)
        gate, up = linears[i](normed), linears[i + 1](normed)
        inner = torch.nn.functional.silu(gate) * up
        if i % 2:
            inner = torch.tanh(inner).view(2, 2, SIZE).transpose(0, 1).reshape(4, SIZE)
        hidden = hidden + linears[i + 2](inner)
    return hidden + first


def recorded_graph_of(step: Callable[[], Tensor], inputs: list[Tensor]) -> RecordedGraph:
    with torch.inference_mode():
        recorder = Recorder()
        with recorder:
            result = step()
        return RecordedGraph(recorder.recording, result, inputs, two_threads())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_layers", [1, 4])
def test_a_tape_with_programs_equals_the_operations(dtype: torch.dtype, num_layers: int) -> None:
    linears = [linear(seed, dtype) for seed in range(3 * num_layers)]
    torch.manual_seed(num_layers)
    weight, x = torch.rand(SIZE).to(dtype) + 0.5, torch.randn(4, SIZE).to(dtype)
    recorded = recorded_graph_of(lambda: layers(x, linears, weight), [x])
    kept = []
    for _ in range(3):
        x.normal_()
        with torch.inference_mode():
            kept.append((recorded.run(), layers(x, linears, weight)))
    for actual, expected in kept:  # read last: a result belongs to its caller, whatever runs next
        # The kernels round their inputs to bf16: the last digit of a norm may flip one.
        tolerance = 2e-3 if dtype == torch.float32 else 2e-2
        assert (actual - expected).norm() <= tolerance * expected.norm()


def test_what_is_native_becomes_few_calls() -> None:
    linears = [linear(seed, torch.float32) for seed in range(12)]
    weight, x = torch.rand(SIZE), torch.randn(4, SIZE)
    recorded = recorded_graph_of(lambda: layers(x, linears[:3] * 4, weight), [x])
    operations = [operation for operation, _ in recorded.profile(1)]
    native = [op for op in operations if isinstance(op.function, NativeCall)]
    assert len(native) >= 4 * 6  # norm, gate with up, silu, product, down, sum
    assert recorded.num_calls < len(operations) / 2


def test_places_are_used_again() -> None:
    linears = [linear(seed, torch.float32) for seed in range(3)]
    weight, x = torch.rand(SIZE), torch.randn(4, SIZE)
    few = recorded_graph_of(lambda: layers(x, linears * 4, weight), [x])
    many = recorded_graph_of(lambda: layers(x, linears * 40, weight), [x])
    assert few.place_bytes == many.place_bytes > 0


def test_a_result_that_is_a_view_of_a_place_is_a_copy() -> None:
    layer, x = linear(0, torch.float32), torch.randn(4, SIZE)
    recorded = recorded_graph_of(lambda: layer(x)[:, None, :], [x])
    before = recorded.run()
    x.normal_()
    after = recorded.run()
    torch.testing.assert_close(after, layer(x)[:, None, :])
    assert not torch.equal(before, after)


def test_memory_that_is_read_under_another_name_is_not_used_again() -> None:
    linears = [linear(seed, torch.float32) for seed in range(8)]
    x = torch.randn(4, SIZE)

    def step() -> Tensor:
        hidden = linears[0](x)
        alias = torch.ops.aten._unsafe_view(hidden, [SIZE, 4])  # declares that it is a copy
        for layer in linears[1:]:
            hidden = layer(hidden)
        return hidden + torch.tanh(alias).view(4, SIZE)

    recorded = recorded_graph_of(step, [x])
    x.normal_()
    torch.testing.assert_close(recorded.run(), step())

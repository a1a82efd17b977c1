"""Tests of chains of small operations in Triton, interpreted, against torch step by step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.decode.cuda.fusion import fuse_for_gpu
from tandem.recording.recorded_graph import RecordedGraph
from tandem.recording.recorder import Recorder
from tests.kernels.interpreter import interpreted_module

pytest.importorskip("triton")


chains = interpreted_module("tandem.triton_kernels.chains")


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def decay(x: Tensor, rates: Tensor, bias: Tensor) -> Tensor:
    """Compute the decay of Qwen3-Next, in fp32 for any input."""
    return -rates.float().exp() * F.softplus(x.float() + bias)


def gate(x: Tensor, other: Tensor) -> Tensor:
    """Compute a gate with one input used twice and one used elsewhere."""
    half = x * 0.5
    return half * torch.sigmoid(other) + half * torch.tanh(half)


def activate(x: Tensor, other: Tensor) -> Tensor:
    return F.relu(x).square() / torch.exp(-F.silu(other))


CASES: list[tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = [
    (decay, [(3, 1, 7), (7,), (7,)]),
    (gate, [(3, 70), (3, 1)]),  # a number for each row
    (activate, [(2, 1, 600), (2, 1, 600)]),
]


def recorded(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, RecordedGraph]:
    recorder = Recorder()
    with torch.inference_mode(), recorder:
        result = function(*inputs)
    return result, RecordedGraph(recorder.recording, result, inputs, fusing=fuse_for_gpu)


@pytest.mark.usefixtures("chains")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("function", "shapes"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_chain_is_one_launch_and_gives_what_torch_gives(
    function: Callable[..., Tensor], shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    wide = [draw(*shape[:-1], 2 * shape[-1], dtype=dtype, seed=len(shape)) for shape in shapes]
    inputs = [x[..., : shape[-1]] for x, shape in zip(wide, shapes, strict=True)]  # with gaps
    _, graph = recorded(function, inputs)
    assert [operation.name for operation in graph.operations] == ["chain"]
    for x in wide:
        x.copy_(draw(*x.shape, dtype=dtype, seed=9))
    expected, tolerance = function(*inputs), 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(graph.run(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("chains")
def test_what_others_read_or_write_is_left_as_it_is() -> None:
    x, memory = draw(4, 8), draw(4, 8, seed=1)

    def step(x: Tensor, memory: Tensor) -> Tensor:
        doubled = memory * 2.0  # of what is written next
        memory.copy_(x)
        half = x * 0.5
        return torch.cat([torch.sigmoid(half), half, torch.tanh(doubled)])

    before = memory.clone()
    expected, graph = recorded(step, [x, memory])
    assert [op.name for op in graph.operations] == [
        "mul", "copy_", "mul", "sigmoid", "tanh", "cat"
    ]  # fmt: skip
    memory.copy_(before)
    torch.testing.assert_close(graph.run(), expected)


@pytest.mark.usefixtures("chains")
def test_no_more_than_the_kernel_reads() -> None:
    inputs = [draw(2, 8, seed=seed) for seed in range(7)]

    def add(*tensors: Tensor) -> Tensor:
        total = tensors[0]
        for tensor in tensors[1:]:
            total = total + tensor
        return total

    expected, graph = recorded(add, inputs)
    assert [operation.name for operation in graph.operations] == ["chain", "chain"]
    torch.testing.assert_close(graph.run(), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, which interprets
def test_values_that_are_not_finite_stay_so(chains: Any) -> None:
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 30.0, -30.0]])
    for name, function in (
        ("silu", F.silu), ("sigmoid", torch.sigmoid), ("softplus", F.softplus),
        ("relu", F.relu), ("tanh", torch.tanh),
    ):  # fmt: skip
        steps = chains.Chain((chains.KINDS[name],), (0,), (0,), (0,), ())
        found = chains.chain([x], steps, (1, 5), torch.float32)
        torch.testing.assert_close(found, function(x), equal_nan=True, msg=name)


def test_dense_values_need_no_kernel_for_each_shape(
    chains: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Index scores have a column per position, so a longer text must not compile a kernel."""
    run, compiled = chains.run_chain, []

    class Noted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **constants: Any) -> None:
                compiled.append(repr(constants))
                run[grid](*args, **constants)

            return launch

    monkeypatch.setattr(chains, "run_chain", Noted())
    kinds = chains.KINDS["mul"], chains.KINDS["relu"]
    steps = chains.Chain(kinds, (0, 2), (1, 2), (0, 0), (0.5,))
    for shape in ((2, 3, 64), (1, 3, 128), (5, 1), (1, 1)):
        found = chains.chain([x := draw(*shape)], steps, shape, torch.float32)
        assert torch.equal(found, F.relu(x * 0.5))
    assert len(set(compiled)) == 1

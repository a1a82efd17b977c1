"""Tests of fusion in captured steps: the model's logits, on the twin, with interpreted kernels."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tandem
from tandem.decode.cuda.compiling import step_compilations
from tandem.decode.cuda.fusion import fuse_for_gpu
from tandem.decode.cuda.graphs import recorded_for_capture
from tandem.decode.cuda.slots import CudaSlotPool
from tandem.hf.dense import on_device, pack_for_device
from tandem.hf.experts import bind_all
from tandem.hf.lookahead.warm_up import NoExperts
from tandem.kernels.device_states import Run, SlotTokens, StateMemory, logged_values
from tandem.kernels.formats.weight_format import find_format
from tandem.kernels.opaque_calls import EXPERTS
from tandem.kernels.recurrent import MOST_DRAFTED, Recurrence, RecurrenceForm
from tandem.kernels.torch_private import operator_schema
from tandem.recording.recorded_graph import RecordedGraph
from tandem.recording.recorder import Operation
from tests.decode.twin_capture import TwinCapture
from tests.decode.whole_pool import WholePool, require_alike
from tests.hf.tiny import save_tiny_checkpoint
from tests.inside import runtime_in

pytest.importorskip("triton")
# During a twin's capture, the experts' results are arbitrary memory.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TOKENS = [50, 61, 72]
PROMPTS = [[40, 41, 42]]
# Norm (with the sum before it), three projections, two norms of heads, one rotary embedding, three
# of attention, the output, the second norm, router and choice.
MOST_LAUNCHES = 14
# Of linear attention: five projections, convolution, the rate, the decay, the recurrence, its norm
# and gate, the second norm; of the shared expert five and two; router and choice.
MOST_LINEAR_LAUNCHES = 21
_LAUNCHES = {"decode_attention": 3}


def load(directory: Path, name: str, dtype: str = "float32", **values: int) -> Any:
    return tandem.load(save_tiny_checkpoint(directory / name, name, **values), dtype=dtype)


def recorded(model: Any, find_kernels: Any) -> tuple[CudaSlotPool, RecordedGraph]:
    """Record a fused step of one token; return it with its pool."""
    pool = CudaSlotPool(model, 1, capacity=20, find_kernels=find_kernels)
    pool.prefill({0: PROMPTS[0]})
    pool.cache.begin_decode({0: 1}, 1)
    with torch.inference_mode():
        run: Any = pool._steps.recorded(1)
    return pool, run.__self__


@pytest.mark.parametrize(
    ("name", "dtype", "num_layers", "most_off"),
    [
        ("qwen3_moe", "float32", 2, 2e-4),
        ("qwen3_moe", "float16", 2, 1e-2),
        ("gpt_oss", "float32", 4, 2e-4),
    ],
)
def test_a_step_in_fewer_launches_gives_the_models_logits(
    tmp_path: Path, find_kernels: Any, name: str, dtype: str, num_layers: int, most_off: float
) -> None:
    model = load(tmp_path, name, dtype, num_hidden_layers=num_layers)
    pool = CudaSlotPool(model, 1, capacity=20, make_capture=TwinCapture, find_kernels=find_kernels)
    rows = require_alike(pool, model, PROMPTS, most=most_off)
    assert rows.num_segments == len(runtime_in(model).store) + 1


class Noted:
    """Replaces a kernel: launches it, and records the key that it would be compiled for."""

    def __init__(self, kernel: Any, seen: set[str]) -> None:
        self._kernel, self._seen = kernel, seen

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            dtypes = [getattr(a, "dtype", type(a)) for a in args]
            self._seen.add(repr((self._kernel.__name__, dtypes, sorted(constants.items()))))
            self._kernel[grid](*args, **constants)

        return launch


WINDOWS = {"store_in_window", "attend_window_parts", "compress_tokens"}
STREAMS = {"multiply_streams", "weigh_streams", "add_streams"}
SMALL = {"norm_rows", "add_and_norm_rows", "rotate_heads", "choose_experts"}


@pytest.mark.parametrize(
    ("name", "met"),
    [
        ("qwen3_moe", {"store_token", "attend_parts", "join_parts"} | SMALL),
        (
            "deepseek_v4",
            WINDOWS | STREAMS | {"norm_rows", "run_chain", "join_parts", "rotate_pairs"},
        ),
    ],
)
def test_kernels_of_a_step_are_met_before_the_first_one(
    name: str,
    met: set[str],
    tmp_path: Path,
    find_kernels: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tandem.triton_kernels import (
        attention,
        chains,
        compression,
        hyper_connections,
        small,
        windows,
    )

    seen: set[str] = set()
    for module, names in (
        (attention, ("store_token", "attend_parts", "join_parts")),
        (windows, ("store_in_window", "attend_window_parts")),
        (compression, ("compress_tokens",)),
        (hyper_connections, STREAMS),
        (small, SMALL | {"rotate_pairs"}),
        (chains, ("run_chain",)),
    ):
        for kernel in names:
            monkeypatch.setattr(module, kernel, Noted(getattr(module, kernel), seen))
    few = {"hc_sinkhorn_iters": 2} if name == "deepseek_v4" else {}
    directory = save_tiny_checkpoint(tmp_path / "model", name, num_hidden_layers=1, **few)
    model = tandem.load(directory, dtype="float32")
    runtime = runtime_in(model)
    bind_all(runtime.bound, NoExperts(runtime.store))
    for work in step_compilations(model, find_kernels)[:2]:  # of one and of two rows
        work()
    before = set(seen)
    assert {key.split("'")[1] for key in before} == met
    bind_all(runtime.bound, runtime.executor)
    pool = CudaSlotPool(model, 2, capacity=20, make_capture=TwinCapture, find_kernels=find_kernels)
    prompts = [*PROMPTS, [50, 51]]
    WholePool(pool, prompts).decode(TOKENS[:2])
    assert pool.step.why_not is None
    assert seen == before


def launches_of(operation: Operation) -> int:
    """Return how many kernels an operation launches; none if its result is a view."""
    schema = operator_schema(operation.function)
    if schema is not None and any(r.alias_info is not None for r in schema.returns):
        return 0
    return _LAUNCHES.get(operation.name, 1)


def layers_of(operations: Any) -> list[list[Operation]]:
    """Return the operations between the experts of consecutive layers."""
    layers: list[list[Operation]] = [[]]
    for operation in operations:
        if operation.name == EXPERTS:
            layers.append([])
        else:
            layers[-1].append(operation)
    return layers[1:-1]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_layer_of_qwen3_moe_is_few_launches_outside_its_experts(
    tmp_path: Path, find_kernels: Any, dtype: str
) -> None:
    _, graph = recorded(load(tmp_path, "qwen3_moe", dtype), find_kernels)
    (layer, *others) = layers_of(graph.operations)
    names = [operation.name for operation in layer]
    assert sum(map(launches_of, layer)) <= MOST_LAUNCHES, names
    assert all(len(other) == len(layer) for other in others)


def test_packed_projections_of_one_input_are_one_launch(tmp_path: Path, find_kernels: Any) -> None:
    """Queries, keys and values share a launch: two fewer per layer, with logits as accurate."""
    directory = save_tiny_checkpoint(tmp_path / "model", "qwen3_moe", num_hidden_layers=2)
    model = tandem.load(directory, dtype="float32")
    pack_for_device(model, find_format("int8"), on_device(torch.device("cpu")))
    pool, graph = recorded(model, find_kernels)
    with torch.inference_mode():
        torch.testing.assert_close(graph.run(), pool._steps.compute(1), rtol=2e-4, atol=2e-4)
    (layer, *_) = layers_of(graph.operations)
    assert [operation.name for operation in layer].count("packed_linear") == 2  # and the output's
    assert sum(map(launches_of, layer)) <= MOST_LAUNCHES - 2


def test_a_layer_of_linear_attention_is_few_launches_outside_its_experts(
    tmp_path: Path, find_kernels: Any
) -> None:
    _, graph = recorded(load(tmp_path, "qwen3_5_moe"), find_kernels)
    layers = layers_of(graph.operations)
    layer = next(layer for layer in layers if "recur" in [each.name for each in layer])
    names = [operation.name for operation in layer]
    assert {"convolve", "recur", "rms_norm", "chain", "add_and_norm"} <= set(names)
    assert sum(map(launches_of, layer)) <= MOST_LINEAR_LAUNCHES, names


def test_a_recurrence_reads_keys_that_heads_share_without_repeating_them(find_kernels: Any) -> None:
    """Models of Transformers before 5.23 repeat such keys; drafted tokens are still logged."""
    from tandem.triton_kernels.states import TritonStates

    operation = Recurrence(RecurrenceForm(4, 4, 16, 16, "head", is_delta=True, is_normalised=True))
    random = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 5, 2, 16, generator=random) for _ in range(2))
    value, decay = torch.randn(5, 4, 16, generator=random), -torch.rand(5, 4, generator=random)
    states, rate = torch.randn(2, 4, 16, 16, generator=random), torch.rand(5, 4, generator=random)
    log = torch.randn(2, 2, MOST_DRAFTED, logged_values(operation), generator=random)
    runs = torch.tensor([Run(0, 0, 3, 1, 2), Run(1, 3, 2, 1, 1, 1)])

    def step(memory: StateMemory) -> Tensor:
        keys = [x.repeat_interleave(2, dim=2).flatten(0, 1) for x in (query, key)]
        given = value, *keys, decay, rate
        return TritonStates().recur(operation, memory, SlotTokens(runs, 3), *given)

    ours, theirs = (StateMemory(states.clone(), log.clone()) for _ in range(2))
    with torch.inference_mode():
        graph = recorded_for_capture(
            lambda: step(ours), tuple(ours), fuse_for_gpu, lambda index: index
        )
        names = [operation.name for operation in graph.operations]
        assert "recur" in names
        assert "repeat_interleave" not in names
        step(theirs)
        torch.testing.assert_close(graph.run(), step(theirs))
    torch.testing.assert_close(ours, theirs)

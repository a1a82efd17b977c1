"""Tests of capturing whole layers whose experts are all resident, with twins of CUDA graphs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tandem
from tandem.decode.cuda.resident_layers import GraphedLayers
from tandem.decode.padded import PaddedBatch
from tandem.devices.cuda.device import CudaDevice
from tandem.devices.cuda.kernels import TorchKernels
from tandem.experts.cache.clock import WallClock
from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.execution.batch import ExpertFunctions
from tandem.experts.execution.executor import CpuExecutor
from tandem.experts.tracing.events import LayerExecuted
from tandem.hf.experts import expert_functions
from tandem.kernels.reference import expert_ffn
from tests.decode.twin_capture import TwinCapture
from tests.decode.whole_pool import cuda_pool, logits_of
from tests.experts.lazy_streams import LazyStreams
from tests.hf.tiny import save_tiny_checkpoint
from tests.inside import runtime_in

TOKENS = [50, 61, 72, 83, 94, 105, 116, 41]
PROMPTS = [[40, 41, 42], [60] * 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tandem.load(
        save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "mixtral"), dtype="float32"
    )


class WholeLayers:
    """Resident layers, made of operations that the twin captures."""

    def __init__(self, cache: ExpertCache, functions: ExpertFunctions) -> None:
        self._store, self._functions = cache.store, functions
        self.have_arrived = True

    def is_whole(self) -> bool:
        return self.have_arrived

    def prepare(self, num_tokens: int) -> None:
        pass

    def serves(self, functions: ExpertFunctions) -> bool:
        return True

    def execute(
        self, layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, _: Any
    ) -> torch.Tensor:
        host, out = self._store[layer], torch.zeros_like(hidden)
        for expert in range(host.arrivals.num_experts):
            share = torch.where(index == expert, weights, 0).sum(1, keepdim=True)
            row = expert_ffn(hidden, host.weights(expert), self._functions.activate)
            out = out + share * row
        return out


def test_a_model_that_fits_the_device_is_captured_whole(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = runtime_in(model)
    expected = logits_of(PaddedBatch(model, PROMPTS, 0), 2, TOKENS)
    functions = expert_functions(runtime.bound[0][0])
    busy: list[float] = []
    device = CudaDevice(LazyStreams(is_eager=True), TorchKernels(), on_busy=busy.append)
    monkeypatch.setattr(device, "resident", lambda cache: WholeLayers(cache, functions))

    class Executor(CpuExecutor):  # computes the prompt; it need not have a cache
        cache: Any = SimpleNamespace(store=runtime.store, clock=WallClock(), engine=None)

    before, executor = runtime.executor, Executor(runtime.store)
    executor.device = device
    events: list[LayerExecuted] = []
    runtime.use(executor)
    try:
        pool = cuda_pool(model, PROMPTS, 20, make_capture=TwinCapture)
        found = logits_of(pool, 2, TOKENS)
        executor.listeners.append(events.append)
        for token in (70, 80):
            pool.decode([token] * len(PROMPTS))
        num_layers = len(runtime.store)
        assert [event.layer for event in events] == [*range(num_layers)] * 2  # a step late
        pool.continue_with([[40, 41, 42, 43]] * 2)
        pool.pool._steps.report()
        assert [event.layer for event in events] == [*range(num_layers)] * 3
        for event in events:
            assert event.plan is not None
            assert event.plan.gpu == event.load.experts  # type: ignore[union-attr]
            assert event.num_tokens == len(PROMPTS)
        assert busy
    finally:
        runtime.use(before)
    assert pool.step.is_replaying, pool.step.why_not
    assert pool.num_segments == 1
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


def test_pieces_follow_what_is_resident_and_how_many_slots_there_are(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments are merged once all experts are resident; a requested capture size is used."""
    runtime = runtime_in(model)
    device = CudaDevice(LazyStreams(is_eager=True), TorchKernels())
    cache: Any = SimpleNamespace(store=runtime.store, clock=WallClock(), engine=object())
    layers = WholeLayers(cache, expert_functions(runtime.bound[0][0]))
    layers.have_arrived = False
    monkeypatch.setattr(device, "resident", lambda cache: layers)
    executor, before = CpuExecutor(runtime.store), runtime.executor
    executor.cache, executor.device = cache, device
    settled: list[bool] = []
    executor.settle = lambda: settled.append(True)  # type: ignore[method-assign]
    runtime.use(executor)

    def make_room() -> bool:
        cache.engine = object()
        return True

    try:
        pool = cuda_pool(model, PROMPTS, 40, make_capture=TwinCapture)
        monkeypatch.setattr(pool.pool, "_make_room", make_room)
        pool.prefill()
        pieces = []
        for step in range(18):
            layers.have_arrived = step >= 6
            if step == 12:
                cache.engine = object()  # as for a new size
            pool.decode([50 + step] * len(PROMPTS))
            pieces.append(pool.num_segments)
        # Slots that shrink the cache in the middle of a step drop its segments.
        right, failures = GraphedLayers.end_step, iter([True])

        def scarce(self: GraphedLayers) -> None:
            if next(failures, False):
                raise torch.OutOfMemoryError("made up")
            right(self)

        monkeypatch.setattr(GraphedLayers, "end_step", scarce)
        assert pool.step.is_replaying
        pool.decode([50] * len(PROMPTS))
        assert pool.num_segments == 0
    finally:
        runtime.use(before)
    assert pieces == [0, 0, 5, 5, 5, 5, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1]
    assert len(settled) == 18 + 2

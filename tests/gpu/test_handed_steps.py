"""Tests of decode steps as one graph on a real GPU: the CPU's logits, moves, lost steps."""

import time
from typing import Any

import pytest
import torch

from tandem.core.errors import ExecutionError
from tandem.decode.cuda.graphs import CapturedStep
from tandem.decode.cuda.slots import new_cuda_slot_pool
from tandem.devices.cuda.driver import DRIVER_LIBRARY
from tandem.devices.cuda.handed_steps import HandedSteps
from tandem.experts.execution import captured_steps
from tandem.experts.tracing.cache_statistics import CacheStatistics
from tandem.generate.generator import Generator
from tandem.kernels import _native
from tandem.kernels.engine import best_isa
from tests.experts.captured import native_layers
from tests.experts.machines import GEOMETRY, make_store
from tests.gpu.models import IS_DRY, compare_logits, load_pair
from tests.inside import runtime_in

pytestmark = pytest.mark.skipif(IS_DRY, reason="needs the Triton kernels")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    directory = tmp_path_factory.mktemp("models")
    return load_pair(directory, "qwen3_moe", torch.float32, expert_dtype="mxfp4")


def steps_of(model: Any) -> HandedSteps:
    captured = runtime_in(model).executor.captured
    assert isinstance(captured, HandedSteps), "this machine hands no layers over"
    return captured


def test_an_expert_is_copied_and_published_by_the_driver() -> None:
    store = make_store()
    coordinator = _native.StepCoordinator(native_layers(store), 1, best_isa())
    host = torch.zeros(GEOMETRY.num_layers, GEOMETRY.num_experts, dtype=torch.int64)
    table, slot = host.cuda(), torch.zeros(store[0].image_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    link = _native.DriverLink(DRIVER_LIBRARY, table.data_ptr())
    coordinator.manage_slots(host, [slot.data_ptr()], slot.nbytes, None, 0.0, None, link)
    coordinator.submit([(1, 3, 0, -1)])
    coordinator.drain_copies()
    assert not coordinator.copy_error()
    (extent,) = store[1].extents(3)
    assert torch.equal(slot.cpu()[: len(extent.data)], extent.data)
    assert host[1, 3] == slot.data_ptr()
    assert table[1, 3].item() in (slot.data_ptr(), 0)  # 0: the driver writes no words
    coordinator.close()


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 4, 8])
def test_steps_say_what_the_cpu_says_while_experts_move(
    pair: tuple[Any, Any], num_sequences: int
) -> None:
    alone, hybrid = pair
    steps_of(hybrid)
    statistics = CacheStatistics()
    runtime_in(hybrid).executor.listeners.append(statistics)
    ours, theirs = (
        new_cuda_slot_pool(hybrid, num_sequences),
        Generator(alone).slot_pool(num_sequences),
    )
    prompts = {row: [40 + row] * (3 + row) for row in range(num_sequences)}
    pairs = [(ours.prefill(prompts), theirs.prefill(prompts))]
    for step in range(40):
        tokens = {row: 50 + (7 * step + row) % 60 for row in range(num_sequences)}
        pairs.append((ours.decode(tokens).clone(), theirs.decode(tokens).clone()))
    runtime_in(hybrid).executor.listeners.remove(statistics)
    for here, there in pairs:
        divergence, is_same = compare_logits(here, there)
        assert divergence <= 1e-3
        assert is_same
    recording: Any = ours.step.recording
    assert recording is not None, ours.step.why_not
    assert recording.num_segments == 1
    assert statistics.hits > 0
    assert statistics.copies > 0


@pytest.mark.parametrize("kind", ["dies", "stalls"])
def test_a_lost_step_is_a_sentence_and_the_next_is_right(
    pair: tuple[Any, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog releases the GPU; nothing hangs."""
    alone, hybrid = pair
    ours, theirs = new_cuda_slot_pool(hybrid, 1), Generator(alone).slot_pool(1)
    ours.prefill({0: [40, 41, 42]}), theirs.prefill({0: [40, 41, 42]})
    for step in range(8):
        ours.decode({0: 50 + step}), theirs.decode({0: 50 + step})
    assert ours.step.is_replaying, ours.step.why_not

    def fail(layer: int) -> None:
        if layer == 1 and kind == "dies":
            raise MemoryError("no memory")
        if layer == 1:
            time.sleep(0.45)  # beyond the watchdog's limit, and back before it ends again

    steps_of(hybrid).coordinator.set_hook(fail)
    with monkeypatch.context() as patch:
        patch.setattr(captured_steps, "PATIENCE_SECONDS", 0.3)
        with pytest.raises(ExecutionError, match="the request is lost"):
            ours.decode({0: 70})
    steps_of(hybrid).coordinator.set_hook(None)
    ours = new_cuda_slot_pool(hybrid, 1)
    ours.prefill({0: [40, 41, 42]})
    for step in range(8):
        ours.decode({0: 50 + step})
    for step in range(4):
        divergence, _ = compare_logits(ours.decode({0: 70 + step}), theirs.decode({0: 70 + step}))
        assert divergence <= 1e-3


def test_the_host_launches_a_tokens_graphs_and_no_more(pair: tuple[Any, Any]) -> None:
    pool, steps = new_cuda_slot_pool(pair[1], 1), 5
    pool.prefill({0: [40, 41, 42]})
    for step in range(8):
        pool.decode({0: 50 + step})
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for step in range(steps):
            pool.decode({0: 60 + step})
    counts = {event.key: event.count for event in profile.key_averages()}
    recording = pool.step.recording
    assert isinstance(recording, CapturedStep)
    assert counts.get("cudaGraphLaunch", 0) == steps * recording.num_graphs
    assert recording.num_segments == 1


def test_generate_gives_text(pair: tuple[Any, Any]) -> None:
    pair[1].generation_config.eos_token_id = None
    generator = Generator(pair[1])
    answers = [generator.generate([40, 41], max_new_tokens=40, temperature=0)[0] for _ in range(2)]
    assert all(len(answer.token_ids) == 40 for answer in answers)

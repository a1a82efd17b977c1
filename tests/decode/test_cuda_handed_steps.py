"""Tests of decode steps captured as one graph with handed-over layers: a whole model on CPU twins.

CUDA's graph is a twin, publish and combine run in Triton's interpreter, the coordinator is the real
one, and a driver without a GPU copies the experts.
"""

import dataclasses
import errno
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tandem
from tandem.core.errors import ExecutionError
from tandem.decode.cuda import graphs
from tandem.devices.cuda.signals import KernelSignals
from tandem.experts.execution.forced_routing import ForcedRouting
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.experts.tracing.cache_statistics import CacheStatistics
from tandem.experts.tracing.events import LayerExecuted
from tandem.hardware.profiles import save_profile
from tandem.hf.config import OffloadConfig
from tandem.hf.lookahead.look_ahead import LookAhead, look_ahead
from tandem.hf.lookahead.routers import find_routers
from tandem.hf.machine.parts import observe
from tandem.hf.runtime import require_runtime
from tandem.policy.assignment import IN_GRAPH
from tandem.policy.step_path import capture_size
from tandem.trace import RoutingTrace, TraceMeta
from tests.decode.handed_steps import (
    TOKENS,
    assert_alike,
    check_slots,
    executor_on_twins,
    expected_of,
    prompts,
    steps_of,
)
from tests.decode.twin_capture import TwinCapture
from tests.decode.whole_pool import WholePool, cuda_pool, logits_of
from tests.disk.loading import slots_of, with_share
from tests.experts.captured import SLOW_CPU
from tests.experts.driver_library import DriverLibrary
from tests.experts.machines import make_machine
from tests.hf.tiny import save_tiny_checkpoint
from tests.kernels.interpreter import interpreted

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    name, dtype, *share = getattr(request, "param", ("mixtral", "float32"))
    directory = save_tiny_checkpoint(tmp_path_factory.mktemp("models") / name, name)
    # Both processors compute these experts with equal results.
    model = tandem.load(directory, dtype=dtype, expert_dtype="mxfp4")
    if not share:
        return model
    return with_share(tandem.save(model, directory / "packed"), *share, dtype=dtype)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> DriverLibrary:
    return DriverLibrary(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def executor(
    model: Any, library: DriverLibrary, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[HybridExecutor]:
    """Return an executor on the twins with a part of the experts resident, by an assignment."""
    assignment = getattr(request, "param", None)
    library.reset(delay=50)
    cpu = 2e-4 if assignment is None else SLOW_CPU
    save_profile(make_machine(cpu=cpu, gpu=4e-5, link=1e-6, dense=1e-4).profile, tmp_path / "p")
    config = OffloadConfig(
        device="cuda", gpu_memory="32MB", threads=1, cache_dir=str(tmp_path),
        profile=str(tmp_path / "p"), assignment=assignment,
    )  # fmt: skip
    runtime = require_runtime(model)
    before = runtime.executor
    with interpreted():
        observed = dataclasses.replace(observe(model, runtime), options=config)
        executor = executor_on_twins(observed, library)
        runtime.use(executor)
        yield executor
        runtime.use(before)
        executor.close()


@pytest.mark.parametrize(
    ("model", "num_sequences"),
    [
        (("mixtral", "float32"), 1),
        (("mixtral", "float32"), 2),
        (("mixtral", "float32"), 3),
        (("mixtral", "bfloat16"), 1),
        (("mixtral", "float16"), 1),
        (("mixtral", "float16"), 2),
        (("qwen3_5_moe", "float32"), 1),  # states beside keys and values
        (("lfm2_moe", "float32"), 2),
    ],
    indirect=["model"],
)
def test_a_step_is_one_graph_and_gives_the_cpus_logits(
    model: Any, executor: HybridExecutor, num_sequences: int
) -> None:
    expected = expected_of(model, prompts(num_sequences))
    statistics, events = CacheStatistics(), list[LayerExecuted]()
    executor.listeners += [statistics, events.append]
    for compile_one in steps_of(executor).compilations():  # no answer comes, and nothing is lost
        compile_one()
    pool = cuda_pool(model, prompts(num_sequences), 30, make_capture=TwinCapture)
    assert_alike(logits_of(pool, num_sequences, TOKENS), expected)
    assert pool.step.is_replaying, pool.step.why_not
    assert pool.num_segments == 1
    executor.catch_up()
    assert statistics.hits > 0
    assert statistics.copies > 0
    num_layers = len(executor.store)
    assert [event.layer for event in events] == [*range(num_layers)] * (len(TOKENS) + num_sequences)
    assert all(event.num_tokens == num_sequences for event in events[-num_layers:])
    check_slots(executor)


@pytest.mark.parametrize("executor", IN_GRAPH[1:], indirect=True)
@pytest.mark.parametrize("num_sequences", [1, 2])
def test_misses_are_fetched_in_the_same_graph(
    model: Any, executor: HybridExecutor, num_sequences: int
) -> None:
    expected, events = expected_of(model, prompts(num_sequences)), list[LayerExecuted]()
    executor.listeners.append(events.append)
    for compile_one in steps_of(executor).compilations():
        compile_one()
    pool = cuda_pool(model, prompts(num_sequences), 30, make_capture=TwinCapture)
    assert_alike(logits_of(pool, num_sequences, TOKENS), expected)
    assert pool.step.is_replaying, pool.step.why_not
    assert pool.num_segments == 1
    plans = [e.plan for e in events if e.num_tokens == num_sequences and e.plan is not None]
    assert sum(len(plan.fetch) for plan in plans) > 0
    check_slots(executor)


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_the_next_router_runs_in_the_same_graph(
    model: Any, library: DriverLibrary, tmp_path: Path, num_sequences: int
) -> None:
    """The router's prediction is in the mailbox, and its experts are prefetched."""
    library.reset(delay=50)
    save_profile(make_machine(cpu=SLOW_CPU, gpu=4e-5, link=1e-6).profile, tmp_path / "p")
    config = OffloadConfig(
        device="cuda", gpu_memory="32MB", threads=1, cache_dir=str(tmp_path),
        profile=str(tmp_path / "p"), assignment="ready-on-gpu", prediction="regression",
        look_ahead=True,
    )  # fmt: skip
    expected, runtime = expected_of(model, prompts(num_sequences)), require_runtime(model)
    before, events = runtime.executor, list[LayerExecuted]()
    with interpreted():
        ahead = look_ahead(model, runtime.bound, runtime.store, ("residual",), cache_path=tmp_path)
        assert isinstance(ahead, LookAhead)
        found = observe(model, runtime)
        observed = dataclasses.replace(found, options=config, look_ahead_routers=ahead.for_graphs())
        assert observed.why_planned() is None
        executor = executor_on_twins(observed, library)
        executor.listeners.append(events.append)
        runtime.use(executor)
        for compile_one in steps_of(executor).compilations():
            compile_one()
        pool = cuda_pool(model, prompts(num_sequences), 30, make_capture=TwinCapture)
        assert_alike(logits_of(pool, num_sequences, TOKENS), expected)
        assert pool.step.is_replaying, pool.step.why_not
        assert pool.num_segments == 1
        assert ahead.residuals.means.any()  # learned in prompts
        routers = find_routers(model, runtime.bound)
        assert not isinstance(routers, str)
        router_input = steps_of(executor).router_inputs[0] + ahead.residuals.means[0]
        guess = steps_of(executor).guess_of(capture_size(num_sequences), 0)
        chosen = routers[1].choose(router_input[:num_sequences]).sort().values.tolist()
        assert [sorted(row) for row in guess[:num_sequences]] == chosen
        assert all(set(row) == {-1} for row in guess[num_sequences:])  # idle
        assert any(event.plan.prefetch for event in events if event.plan is not None)
        check_slots(executor)
        runtime.use(before)
        executor.close()
        ahead.close()


@pytest.mark.parametrize("model", [("qwen3_5_moe", "float32")], indirect=True)
def test_drafted_tokens_are_verified_in_one_graph(model: Any, executor: HybridExecutor) -> None:
    expected = expected_of(model, prompts(1))[1:]
    pool = cuda_pool(model, prompts(1), 30, make_capture=TwinCapture)
    pool.prefill()
    done = 0
    for num_kept in (1, 2, 3, 1, 1):
        drafted = TOKENS[done : done + 3]
        logits = pool.pool.verify({0: drafted})
        assert_alike(logits[:, None], expected[done : done + 3])
        done += num_kept
        pool.pool.keep(0, len(prompts(1)[0]) + done)
    assert pool.step.is_replaying, pool.step.why_not
    assert pool.num_segments == 1


def test_prompts_between_them_and_other_sizes_use_the_same_cache(
    model: Any, executor: HybridExecutor
) -> None:
    num_sequences = 2
    again = [[*prompt, 70, 71] for prompt in prompts(num_sequences)]
    expected = expected_of(model, again)
    pool = cuda_pool(model, prompts(num_sequences), 60, make_capture=TwinCapture)
    logits_of(pool, num_sequences, TOKENS)
    for slots in (None, 3, 9):
        if slots is not None:
            executor.resize(slots)
        pool.continue_with(again)
        assert_alike(logits_of(pool, num_sequences, TOKENS), expected)
        assert pool.num_segments == 1
        check_slots(executor)
        assert slots is None or executor.cache.num_slots == slots


def test_a_lost_step_is_a_sentence_and_the_next_is_right(
    model: Any, executor: HybridExecutor
) -> None:
    expected = expected_of(model, prompts(1))
    pool = cuda_pool(model, prompts(1), 40, make_capture=TwinCapture)
    logits_of(pool, 1, TOKENS)
    is_bad = True

    def fail(layer: int) -> None:
        if is_bad and layer == 1:
            raise MemoryError("no memory")

    steps_of(executor).coordinator.set_hook(fail)
    with pytest.raises(ExecutionError, match=r"has ended \(MemoryError: no memory\).*is lost"):
        pool.decode([50])
    is_bad = False
    pool = cuda_pool(model, prompts(1), 40, make_capture=TwinCapture)
    assert_alike(logits_of(pool, 1, TOKENS), expected)
    check_slots(executor)


def test_a_step_that_the_gpu_gave_up_is_never_used(
    model: Any, executor: HybridExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answering thread stops, as in a suspended process, and continues later."""
    from tandem.devices.cuda import handing

    steps, expected = steps_of(executor), expected_of(model, prompts(1))
    monkeypatch.setattr(steps, "_signals", KernelSignals(9.0))
    pool = cuda_pool(model, prompts(1), 40, make_capture=TwinCapture)
    logits_of(pool, 1, TOKENS)

    def stand_still(layer: int) -> None:
        end = time.perf_counter() + 60
        while layer == 1 and int(steps._words.given_up) == 0 and time.perf_counter() < end:
            time.sleep(1e-3)

    with monkeypatch.context() as patch:
        patch.setattr(handing, "_LOOKS_OFF_GPU", 200)
        steps.coordinator.set_hook(stand_still)
        with pytest.raises(ExecutionError, match=r"waited for 9 seconds .* is lost, the model can"):
            pool.decode([50])
    steps.coordinator.set_hook(None)
    pool = cuda_pool(model, prompts(1), 40, make_capture=TwinCapture)
    assert_alike(logits_of(pool, 1, TOKENS), expected)
    check_slots(executor)


@pytest.mark.parametrize(
    "model", [("mixtral", "float32", 0.0), ("qwen3_5_moe", "float32", 0.0)], indirect=True
)
def test_a_step_that_waits_too_long_for_a_disk_is_planned_instead(
    model: Any, executor: HybridExecutor
) -> None:
    expected, slots = expected_of(model, prompts(1)), slots_of(model)
    pool = cuda_pool(model, prompts(1), 40, make_capture=TwinCapture)
    executor.resize(executor.cache.geometry.top_k)  # the first layer alone needs all of them
    found = [pool.prefill().clone()]
    for place, token in enumerate(TOKENS):
        is_slow = place == len(TOKENS) - 2
        if is_slow:
            assert pool.step.is_replaying, pool.step.why_not
            slots.native.fail(0, 1, 1.5)
        found.append(pool.decode([token]).clone())
        slots.native.fail(0, 0, 0.0)
        assert steps_of(executor)._is_entered != is_slow
    assert_alike(found, expected)
    check_slots(executor)


@pytest.mark.parametrize("model", [("mixtral", "float32", 0.3)], indirect=True)
def test_a_failed_read_in_a_step_is_a_sentence_and_the_next_is_right(
    model: Any, executor: HybridExecutor
) -> None:
    expected, slots = expected_of(model, prompts(1)), slots_of(model)
    executor.resize(executor.cache.geometry.top_k)
    pool = cuda_pool(model, prompts(1), 40, make_capture=TwinCapture)
    logits_of(pool, 1, TOKENS)
    slots.native.fail(errno.EIO, 1, 0.0)
    with pytest.raises(ExecutionError, match=r"Input/output error.* is lost, the model can"):
        [pool.decode([token]) for token in range(40, 80)]
    slots.native.fail(0, 0, 0.0)
    pool = cuda_pool(model, prompts(1), 40, make_capture=TwinCapture)
    assert_alike(logits_of(pool, 1, TOKENS), expected)


def test_what_cannot_be_captured_goes_the_way_of_segments_and_says_so(
    model: Any, executor: HybridExecutor
) -> None:
    steps_of(executor).error = "made up"
    pool: WholePool = cuda_pool(model, prompts(1), 30, make_capture=TwinCapture)
    with pytest.warns(UserWarning, match="a break at the experts of each layer: .*made up"):
        logits_of(pool, 1, TOKENS)
    assert pool.step.is_replaying, pool.step.why_not
    assert pool.num_segments == len(executor.store) + 1
    assert steps_of(executor).is_given_up


def test_a_gpu_that_does_not_end_is_a_sentence(
    model: Any, executor: HybridExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem.devices.cuda import handed_steps

    never, steps = SimpleNamespace(query=lambda: False), steps_of(executor)
    pool = cuda_pool(model, prompts(1), 30, make_capture=TwinCapture)
    logits_of(pool, 1, TOKENS)
    with monkeypatch.context() as patch:
        patch.setattr(handed_steps, "PATIENCE_SECONDS", 0.05)
        patch.setattr(steps._streams, "record", lambda stream, **_: never)
        steps.coordinator.set_hook(lambda layer: (_ for _ in ()).throw(MemoryError("made up")))
        with pytest.raises(ExecutionError, match=r"lazy has not come to the end .*start the prog"):
            pool.decode([50])
    steps.coordinator.set_hook(None)


def made_trace(executor: HybridExecutor, top_k: int) -> RoutingTrace:
    geometry, num_tokens = executor.cache.geometry, 50
    meta = TraceMeta(
        model="made up", n_moe_layers=geometry.num_layers, n_experts=geometry.num_experts,
        top_k=top_k,
    )  # fmt: skip
    shape = num_tokens, geometry.num_layers, geometry.num_experts
    experts = np.random.default_rng(0).random(shape).argsort(-1)[..., :top_k].astype(np.uint8)
    return RoutingTrace(meta=meta, experts=experts, seq_offsets=np.array([0, num_tokens]))


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_a_long_step_is_several_graphs_launched_in_sequence(
    model: Any, executor: HybridExecutor, num_sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "LAYERS_A_GRAPH", 1)
    expected = expected_of(model, prompts(num_sequences))
    pool = cuda_pool(model, prompts(num_sequences), 30, make_capture=TwinCapture)
    assert_alike(logits_of(pool, num_sequences, TOKENS), expected)
    assert pool.step.is_replaying, pool.step.why_not
    recording: Any = pool.step.recording
    assert (pool.num_segments, recording.num_graphs) == (1, len(executor.store) + 1)
    check_slots(executor)


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_a_forced_routing_is_handed_over_in_the_same_graph(
    model: Any, executor: HybridExecutor, num_sequences: int
) -> None:
    runtime, events = require_runtime(model), list[LayerExecuted]()
    trace = made_trace(executor, executor.cache.geometry.top_k)
    with runtime.using(ForcedRouting(executor, trace)):
        pool = cuda_pool(model, prompts(num_sequences), 30, make_capture=TwinCapture)
        logits_of(pool, num_sequences, TOKENS)
        assert pool.step.is_replaying, pool.step.why_not
        assert pool.num_segments == 1
        executor.listeners.append(events.append)
        at = sum(map(len, prompts(num_sequences))) + len(TOKENS) * num_sequences
        for token in (50, 51):
            pool.decode([token] * num_sequences)
            executor.catch_up()
            routes = trace.experts[at : at + num_sequences].transpose(1, 0, 2).tolist()
            assert [event.load and event.load.routes for event in events] == routes
            at += num_sequences
            events.clear()
    check_slots(executor)


def test_a_forced_routing_of_more_experts_goes_by_segments(
    model: Any, executor: HybridExecutor
) -> None:
    trace = made_trace(executor, executor.cache.geometry.top_k + 1)
    with require_runtime(model).using(ForcedRouting(executor, trace)):
        pool: WholePool = cuda_pool(model, prompts(1), 30, make_capture=TwinCapture)
        logits_of(pool, 1, TOKENS[:3])
    assert pool.num_segments == len(executor.store) + 1

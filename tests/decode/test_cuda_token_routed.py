"""Tests of layers routed by token in captured steps on CPU twins: experts are prefetched."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.experts.tracing.cache_statistics import CacheStatistics
from tandem.experts.tracing.events import LayerExecuted
from tandem.hardware.profiles import save_profile
from tandem.hf.config import OffloadConfig
from tandem.hf.lookahead.look_ahead import LookAhead, look_ahead
from tandem.hf.lookahead.routers import find_routers
from tandem.hf.machine.parts import observe
from tandem.hf.runtime import require_runtime
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
from tests.decode.whole_pool import cuda_pool, logits_of
from tests.experts.captured import SLOW_CPU
from tests.experts.driver_library import DriverLibrary
from tests.experts.machines import make_machine
from tests.hf.tiny import save_tiny_checkpoint
from tests.kernels.interpreter import interpreted

pytest.importorskip("triton")

HASHED: dict[str, Any] = {
    "n_routed_experts": 128, "num_hidden_layers": 2, "mlp_layer_types": ["hash_moe"] * 2,
    "layer_types": ["sliding_attention"] * 2, "hc_sinkhorn_iters": 1,
}  # fmt: skip


@contextmanager
def on_twins(
    model: Any, directory: Path, ahead: LookAhead | None = None, **options: Any
) -> Iterator[HybridExecutor]:
    """Return a model on a GPU's twins, with a slow CPU and a fast link."""
    library = DriverLibrary(directory)
    library.reset(delay=50)
    machine = make_machine(cpu=SLOW_CPU, gpu=4e-5, link=1e-6, dense=1e-3)
    save_profile(machine.profile, directory / "p")
    config = OffloadConfig(
        device="cuda", gpu_memory="32MB", threads=1, cache_dir=str(directory),
        profile=str(directory / "p"), assignment="ready-on-gpu", **options,
    )  # fmt: skip
    runtime = require_runtime(model)
    with interpreted():
        observed = dataclasses.replace(observe(model, runtime), options=config)
        if ahead is not None:
            observed = dataclasses.replace(observed, look_ahead_routers=ahead.for_graphs())
        assert observed.why_planned() is None
        executor = executor_on_twins(observed, library)
        runtime.use(executor)
        yield executor
        check_slots(executor)
        runtime.use(runtime.cpu_executor())
        executor.close()


def test_experts_that_tokens_choose_are_copied_ahead(tmp_path: Path) -> None:
    """The first layer's experts too, without an option and without a kernel."""
    directory = save_tiny_checkpoint(tmp_path / "hashed", "deepseek_v4", **HASHED)
    model: Any = tandem.load(directory, dtype="float32", expert_dtype="mxfp4")
    expected, statistics = expected_of(model, prompts(2)), CacheStatistics()
    events = list[LayerExecuted]()
    with on_twins(model, tmp_path) as executor:
        pool = cuda_pool(model, prompts(2), 30, make_capture=TwinCapture)
        assert_alike(logits_of(pool, 2, TOKENS), expected)
        assert pool.step.is_replaying, pool.step.why_not
        executor.listeners += [statistics, events.append]
        for token in TOKENS[:4]:
            pool.decode([token + 1, token + 2])
    before = [copy for event in events for copy in event.step_copies]
    assert {copy.layer for copy in before} == {0, 1}
    assert statistics.prefetch_issued >= len(before) > 4
    # How many arrive in time depends on the machine; which ones are copied does not.
    for two in zip(*[iter(events)] * 2, strict=True):
        copies = [copy for event in two for copy in (*event.step_copies, *event.plan.prefetch)]
        assert all(copy.expert in two[copy.layer].load.experts for copy in copies)


def test_a_captured_step_asks_the_routers_that_tokens_do_not_decide(tmp_path: Path) -> None:
    """Only the last router is predicted; it adds a bias to its scores."""
    values = {**HASHED, "num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 3}
    values |= {"mlp_layer_types": ["hash_moe"] * 2 + ["moe"]}
    directory = save_tiny_checkpoint(tmp_path / "asked", "deepseek_v4", **values)
    model: Any = tandem.load(directory, dtype="float32", expert_dtype="mxfp4")
    bias = model.model.layers[2].mlp.gate.e_score_correction_bias
    bias.normal_(generator=torch.Generator().manual_seed(0))
    runtime, events = require_runtime(model), list[LayerExecuted]()
    expected = expected_of(model, prompts(1))
    ahead = look_ahead(model, runtime.bound, runtime.store, ("residual",), cache_path=tmp_path)
    assert isinstance(ahead, LookAhead)
    with on_twins(model, tmp_path, ahead, look_ahead=True) as executor:
        executor.listeners.append(events.append)
        pool = cuda_pool(model, prompts(1), 30, make_capture=TwinCapture)
        assert_alike(logits_of(pool, 1, TOKENS), expected)
        assert pool.step.is_replaying, pool.step.why_not
        assert pool.num_segments == 1
        steps, routers = steps_of(executor), find_routers(model, runtime.bound)
        assert not isinstance(routers, str)
        chosen = routers[2].choose(steps.router_inputs[1] + ahead.residuals.means[1]).tolist()
        assert sorted(steps.guess_of(1, 1)[0]) == sorted(chosen[0])
        assert set(steps.guess_of(1, 0)[0]) == {0}  # nothing has been published
    ahead.close()
    copied = {copy.layer for event in events if event.plan for copy in event.plan.prefetch}
    assert copied == {1, 2}

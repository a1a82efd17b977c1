"""Layers that are routed by token, in captured steps on the CPU twins: their experts come ahead."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.experts.tracing.cache_statistics import CacheStatistics
from tandem.experts.tracing.events import LayerExecuted
from tandem.hardware.profiles import save_profile
from tandem.hf.config import OffloadConfig
from tandem.hf.machine.parts import observe
from tandem.hf.runtime import require_runtime
from tests.decode.handed_steps import (
    TOKENS,
    assert_alike,
    check_slots,
    executor_on_twins,
    expected_of,
    prompts,
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
    "layer_types": ["sliding_attention"] * 2,
}  # fmt: skip


def test_experts_that_tokens_choose_are_copied_ahead_and_used(tmp_path: Path) -> None:
    """Also those of the first layer: without an option, and without a kernel for it."""
    library = DriverLibrary(tmp_path)
    library.reset(delay=50)
    machine = make_machine(cpu=SLOW_CPU, gpu=4e-5, link=1e-6, dense=1e-3)
    save_profile(machine.profile, tmp_path / "p")
    config = OffloadConfig(
        device="cuda", gpu_memory="32MB", threads=1, cache_dir=str(tmp_path),
        profile=str(tmp_path / "p"), assignment="ready-on-gpu",
    )  # fmt: skip
    directory = save_tiny_checkpoint(tmp_path / "hashed", "deepseek_v4", **HASHED)
    model: Any = tandem.load(directory, dtype="float32", expert_dtype="mxfp4")
    expected, runtime = expected_of(model, prompts(2)), require_runtime(model)
    statistics, events = CacheStatistics(), list[LayerExecuted]()
    with interpreted():
        observed = dataclasses.replace(observe(model, runtime), options=config)
        executor = executor_on_twins(observed, library)
        runtime.use(executor)
        rows = cuda_pool(model, prompts(2), 30, make_capture=TwinCapture)
        assert_alike(logits_of(rows, 2, TOKENS), expected)
        assert rows.step.is_replaying, rows.step.why_not
        executor.listeners += [statistics, events.append]
        for token in TOKENS[:4]:
            rows.decode([token + 1, token + 2])
        check_slots(executor)
        runtime.use(runtime.cpu_executor())
        executor.close()
    before = [copy for event in events for copy in event.step_copies]
    assert {copy.layer for copy in before} == {0, 1}
    assert statistics.prefetch_issued >= len(before) > 4
    # A copy that comes late is no hit; on a machine that is busy, some may.
    assert statistics.prefetch_useful > statistics.prefetch_issued // 2
    for two in zip(*[iter(events)] * 2, strict=True):
        copies = [copy for event in two for copy in (*event.step_copies, *event.plan.prefetch)]
        assert all(copy.expert in two[copy.layer].load.experts for copy in copies)

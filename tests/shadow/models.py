"""Whole models on the shadow device, beside the same models on the CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import tandem
from tandem.devices.cuda import hand_over_trial
from tandem.experts.execution import executor as cpu_executor
from tandem.generate.generator import Generator
from tandem.hardware.profiles import save_profile
from tandem.machines import cuda as cuda_machine
from tests.architectures import result_of, tiny_inputs
from tests.decode.whole_pool import WholePool, gpu_pool
from tests.experts.machines import make_machine
from tests.gpu.models import compare_logits
from tests.hf.tiny import save_tiny_checkpoint
from tests.inside import runtime_in
from tests.shadow.device import shadow_gpu
from tests.shadow.gpu import ShadowGpu

PROMPTS = [[40, 41, 42], [60] * 9]
TEXT = list(range(40, 60))
TOKENS = [50, 61, 72, 83, 94]
MOST_DIVERGENCE = 2e-2  # the CPU rounds what its experts read, and kernels on a GPU do not
MEMORY = "1GB"
IS_WHOLE = os.environ.get("TANDEM_DRY_GPU") == "1"
"""Whether to test all architectures, as `make dry-gpu` does; `make test` has one of each kind."""
in_dry_gpu = pytest.mark.skipif(not IS_WHOLE, reason="interpreted for long: make dry-gpu runs it")


class Spoken(NamedTuple):
    """A model's answers: to a text, and in the steps of two slots."""

    text: Tensor
    steps: list[Tensor]


@contextmanager
def quick_loads() -> Iterator[None]:
    """Skip what takes an interpreter minutes: compiling kernels ahead, and long trials.

    `test_parts.py` measures a machine, compiles and tries a hand-over without this.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_machine, "_run_all", lambda works, label, streams: None)
        patch.setattr(cpu_executor, "MAX_TOKENS_AT_ONCE", 64)  # whose workspace is measured
        few = hand_over_trial.TrialLimits(layers=2, router_experts=4, come_seconds=60.0)
        patch.setattr(hand_over_trial, "LIMITS", few)  # the interpreter is no GPU
        yield


def outputs_on_cpu(checkpoint: Path, **options: Any) -> Spoken:
    """Return a checkpoint's answers on the CPU."""
    model: Any = tandem.load(checkpoint, dtype="float32", threads=1, **options)
    try:
        return model_outputs(model, WholePool(Generator(model).slot_pool(2), PROMPTS))
    finally:
        runtime_in(model).executor.close()


def model_outputs(model: Any, pool: WholePool) -> Spoken:
    """Return a model's answers on any device."""
    with torch.no_grad():
        text = model(torch.tensor([TEXT]).to(model.device)).logits.cpu()
    steps = [pool.prefill().cpu().clone()]
    steps += [pool.decode([t, t + 1]).cpu().clone() for t in TOKENS]
    return Spoken(text, steps)


@contextmanager
def loaded(checkpoint: Path, directory: Path, **options: Any) -> Iterator[Any]:
    """Load a checkpoint for the shadow device, with half of its experts resident."""
    given = {"dtype": "float32", **gpu_options(directory), **options}
    model: Any = tandem.load(checkpoint, **given)
    with closed_after(model):
        yield model


def gpu_options(directory: Path) -> dict[str, Any]:
    """Return GPU options with a made-up profile that uses copies and both processors."""
    profile = directory / "made-up.json"
    if not profile.is_file():
        save_profile(make_machine(cpu=2e-4, gpu=4e-5, link=2e-4, dense=1e-4).profile, profile)
    return {
        "device": "cuda", "profile": str(profile), "start_content": "random", "threads": 1,
        "cache_dir": str(directory / "cache"), "gpu_memory": MEMORY,
    }  # fmt: skip


@contextmanager
def closed_after(model: Any, share: float = 0.5) -> Iterator[None]:
    """Make a share of a model's experts resident, and close the device afterwards."""
    executor = runtime_in(model).executor
    geometry = executor.cache.geometry
    executor.resize(int(share * geometry.num_layers * geometry.num_experts))
    try:
        yield
    finally:
        executor.close()


def assert_same(ours: Spoken, theirs: Spoken) -> None:
    """Compare answers; random routers may rarely choose differently."""
    for number, (found, expected) in enumerate(
        [(ours.text, theirs.text), *zip(ours.steps, theirs.steps, strict=True)]
    ):
        divergence, is_same = compare_logits(found, expected, gap=1.0)
        assert divergence <= MOST_DIVERGENCE, f"{number}: {divergence}"
        assert is_same, number


def require_same_on_gpu(
    name: str,
    directory: Path,
    *,
    values: dict[str, int] | None = None,
    gpu_options: dict[str, Any] | None = None,
    on_gpu: dict[str, Any],
    **options: Any,
) -> ShadowGpu:
    """Load a tiny model of an architecture on both, and compare all answers.

    `values` override config values; `on_gpu` are options of the GPU's model.
    """
    checkpoint = save_tiny_checkpoint(directory / name, name, **(values or {}))
    expected = outputs_on_cpu(checkpoint, **options)
    with shadow_gpu(**(gpu_options or {})) as gpu, quick_loads():
        with loaded(checkpoint, directory, **on_gpu, **options) as model:
            ahead = runtime_in(model).executor.cache.settings.predicting_sizes
            assert bool(ahead) == bool({"prefetch_count", "look_ahead"} & {*on_gpu})
            assert {str(p.device) for p in model.parameters() if p.numel()} <= {"cuda:0", "cpu"}
            pool = gpu_pool(model, PROMPTS, 40)
            assert_same(model_outputs(model, pool), expected)
            require_steps_without_waits(gpu, pool)
        assert gpu.registered_bytes == 0
        assert gpu.fraction == 1.0
    return gpu


def require_same_without_slots(name: str, directory: Path) -> None:
    """Compare like `require_same_on_gpu`, for a text without slots.

    No kernels are launched except the experts', which torch computes faster.
    """
    checkpoint = save_tiny_checkpoint(directory / name, name)

    def result(model: Any) -> Tensor:
        inputs = tree_map_only(Tensor, lambda each: each.to(model.device), tiny_inputs(model))
        with torch.no_grad():
            return result_of(model(**inputs)).cpu()

    expected = result(tandem.load(checkpoint, dtype="float32", threads=1))
    with shadow_gpu(kernels="none"), quick_loads(), loaded(checkpoint, directory) as model:
        assert (result(model) - expected).norm() <= 1e-4 * expected.norm()


def require_steps_without_waits(gpu: ShadowGpu, pool: WholePool) -> None:
    """Assert that a captured step is queued without unintended waits."""
    for token in range(8):  # with random weights, some results differ before the others are trusted
        if not pool.step.has_settled:
            pool.decode([token + 50, token + 60])
    assert pool.step.is_replaying, pool.step.why_not
    torch.cuda.set_sync_debug_mode("error")
    for token in TOKENS[:2]:
        pool.decode([token, token + 1])
    torch.cuda.set_sync_debug_mode("default")

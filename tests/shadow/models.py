"""Whole models on the shadow device, beside the same models on the CPU alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tandem
from tandem.devices.cuda import hand_over_cost
from tandem.generate.generator import Generator
from tandem.hardware.profiles import save_profile
from tandem.hf.machine import cuda as cuda_machine
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


class Spoken(NamedTuple):
    """What a model says: of a text, of the steps of two slots."""

    text: Tensor
    steps: list[Tensor]


@contextmanager
def quick_loads() -> Iterator[None]:
    """Leave out what costs an interpreter minutes: kernels compiled ahead, and long trials.

    `test_load_on_shadow.py` does it once.
    """
    from tandem.devices.cuda import handed_layers  # imports kernels, which are interpreted by now

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_machine, "_run_all", lambda works, label, streams: None)
        patch.setattr(hand_over_cost, "_LAYERS", 2)
        patch.setattr(handed_layers, "_TRIAL_SECONDS", 60.0)  # the interpreter is no GPU
        yield


def cpu_says(checkpoint: Path, **options: Any) -> Spoken:
    """Return what a checkpoint says on the CPU alone."""
    model: Any = tandem.load(checkpoint, dtype="float32", threads=1, **options)
    try:
        return said(model, WholePool(Generator(model).slot_pool(2), PROMPTS))
    finally:
        runtime_in(model).executor.close()


def said(model: Any, rows: WholePool) -> Spoken:
    """Ask a model, on whatever device it is."""
    with torch.no_grad():
        text = model(torch.tensor([TEXT]).to(model.device)).logits.cpu()
    steps = [rows.prefill().cpu().clone()]
    steps += [rows.decode([t, t + 1]).cpu().clone() for t in TOKENS]
    return Spoken(text, steps)


@contextmanager
def loaded(checkpoint: Path, directory: Path, **options: Any) -> Iterator[Any]:
    """Load a checkpoint for the shadow device by `tandem.load`, half of its experts resident."""
    profile = directory / "made-up.json"
    if not profile.is_file():
        save_profile(make_machine(cpu=2e-4, gpu=4e-5, link=2e-4, dense=1e-4).profile, profile)
    given = {
        "device": "cuda", "profile": str(profile), "start_content": "random", "threads": 1,
        "cache_dir": str(directory / "cache"), "gpu_memory": MEMORY, "dtype": "float32",
    }  # fmt: skip
    model: Any = tandem.load(checkpoint, **{**given, **options})
    with closed_after(model):
        yield model


@contextmanager
def closed_after(model: Any, share: float = 0.5) -> Iterator[None]:
    """Let a share of a model's experts be resident, and give the device back afterwards."""
    executor = runtime_in(model).executor
    geometry = executor.cache.geometry
    executor.resize(int(share * geometry.num_layers * geometry.num_experts))
    try:
        yield
    finally:
        executor.close()


def assert_same(ours: Spoken, theirs: Spoken) -> None:
    """Compare what a model says on both: routers of random weights may choose otherwise, seldom."""
    for number, (found, expected) in enumerate(
        [(ours.text, theirs.text), *zip(ours.steps, theirs.steps, strict=True)]
    ):
        divergence, is_same = compare_logits(found, expected, gap=1.0)
        assert divergence <= MOST_DIVERGENCE, f"{number}: {divergence}"
        assert is_same, number


def require_same_on_gpu(
    name: str, directory: Path, *, gpu_options: dict[str, Any] | None = None, **options: Any
) -> ShadowGpu:
    """Load a tiny model of an architecture both ways, and compare all that it says."""
    checkpoint = save_tiny_checkpoint(directory / name, name)
    expected = cpu_says(checkpoint, **options)
    with shadow_gpu(**(gpu_options or {})) as gpu, quick_loads():
        with loaded(checkpoint, directory, **options) as model:
            assert {str(p.device) for p in model.parameters() if p.numel()} <= {"cuda:0", "cpu"}
            rows = gpu_pool(model, PROMPTS, 40)
            assert_same(said(model, rows), expected)
            require_steps_without_waits(gpu, rows)
        assert gpu.registered_bytes == 0
        assert gpu.fraction == 1.0
    return gpu


def require_steps_without_waits(gpu: ShadowGpu, rows: WholePool) -> None:
    """A captured step is queued without a wait that is not meant."""
    for token in range(8):  # of random weights, some results differ before the others are trusted
        if not rows.step.has_settled:
            rows.decode([token + 50, token + 60])
    assert rows.step.is_replaying, rows.step.why_not
    torch.cuda.set_sync_debug_mode("error")
    for token in TOKENS[:2]:
        rows.decode([token, token + 1])
    torch.cuda.set_sync_debug_mode("default")

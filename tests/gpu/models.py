"""Models for tests on a GPU: tiny checkpoints, loaded for the CPU alone and for the GPU."""

import os
from pathlib import Path
from typing import Any

import torch

import tandem
from tandem.hardware.profiles import save_profile
from tests.experts.machines import make_machine
from tests.hf.tiny import save_tiny_checkpoint
from tests.inside import runtime_in

# A dry run (conftest) puts the CPU twins in the GPU's place.
IS_DRY = os.environ.get("TANDEM_DRY_GPU") == "1"
DEVICE = "cpu" if IS_DRY else "cuda"


def load_pair(directory: Path, name: str, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """Return one tiny model twice: all on the CPU, and hybrid with a made-up profile.

    With this profile, copies and both processors are used on any machine.
    """
    checkpoint = save_tiny_checkpoint(directory / name, name)
    text = str(dtype).removeprefix("torch.")
    expert_dtype = options.get("expert_dtype", "auto")
    alone = tandem.load(checkpoint, dtype=text, threads=2, expert_dtype=expert_dtype)
    return alone, load_hybrid(checkpoint, text, directory, **options)


def load_hybrid(checkpoint: Path, dtype: str, directory: Path, **options: Any) -> Any:
    """Load a checkpoint for the GPU, with few slots."""
    profile = directory / "made-up.json"
    if not profile.is_file():
        machine = make_machine(cpu=2e-4, gpu=4e-5, link=2e-4, dense=1e-4)
        save_profile(machine.profile, profile)
    given = {
        "device": "cuda",
        "profile": str(profile),
        "start_content": "random",
        "cache_dir": str(directory / "cache"),
        "threads": 2,
    }
    model = tandem.load(checkpoint, dtype=dtype, **{**given, **options})
    executor = runtime_in(model).executor
    geometry = executor.cache.geometry
    if "gpu_memory" not in options:  # half of the experts, less than any reasonable budget
        executor.cache.resize(geometry.num_layers * geometry.num_experts // 2)
    return model


def compare_logits(
    ours: torch.Tensor, theirs: torch.Tensor, gap: float = 0.05
) -> tuple[float, bool]:
    """Return the mean KL divergence, and whether the first choices agree.

    First choices count where their two largest logits are more than `gap` apart.
    """
    ours, theirs = ours.float().cpu().flatten(0, -2), theirs.float().cpu().flatten(0, -2)
    expected = theirs.log_softmax(-1)
    divergence = (expected.exp() * (expected - ours.log_softmax(-1))).sum(-1).mean()
    top = theirs.topk(2, -1).values
    is_clear = (top[:, 0] - top[:, 1]) > gap
    is_same = ours.argmax(-1) == theirs.argmax(-1)
    return float(divergence), bool(is_same[is_clear].all())

"""Tests of layers routed by token in planned steps and prompts: experts are prefetched."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from tandem.experts.tracing.events import LayerExecuted
from tandem.generate.generator import Generator
from tandem.hardware.profiles import save_profile
from tandem.policy.plan import Copy
from tests.experts.machines import make_machine
from tests.hf.tiny import save_tiny_checkpoint
from tests.inside import runtime_in

HASHED = 3
PROMPTS = {0: [40, 41], 1: list(range(50, 90))}


def ahead_of_known(event: LayerExecuted) -> list[Copy]:
    assert event.plan is not None
    return [c for c in (*event.step_copies, *event.plan.prefetch) if c.layer < HASHED]


@pytest.mark.parametrize("look_ahead", [False, True])
def test_planned_steps_and_prompts_fetch_exactly_what_their_tokens_choose(
    tmp_path: Path, *, look_ahead: bool
) -> None:
    """Results are bit-identical. Later layers prefetch only predicted experts."""
    values: dict[str, Any] = {
        "n_routed_experts": 32, "num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 4,
        "mlp_layer_types": ["hash_moe"] * HASHED + ["moe"],
    }  # fmt: skip
    directory = save_tiny_checkpoint(tmp_path / "hashed", "deepseek_v4", **values)
    save_profile(make_machine(cpu=2e-4, gpu=4e-5, link=1e-4, dense=3e-4).profile, tmp_path / "p")
    kinds: dict[str, Any] = {"dtype": "float32", "expert_dtype": "mxfp4", "threads": 1}
    model = tandem.load(
        directory, device="emulated", gpu_memory="32MB", profile=str(tmp_path / "p"),
        cache_dir=str(tmp_path), look_ahead=look_ahead, **kinds,
    )  # fmt: skip
    executor = runtime_in(model).executor
    executor.resize(64)
    events: list[LayerExecuted] = []
    executor.listeners.append(events.append)
    models: list[Any] = [model, tandem.load(directory, **kinds)]
    pools = [Generator(one).slot_pool(2) for one in models]
    found, expected = (pool.prefill(PROMPTS) for pool in pools)
    assert torch.equal(found, expected)
    for token in range(60, 72):
        found, expected = (pool.decode({0: token, 1: token + 20}) for pool in pools)
        assert torch.equal(found, expected)
    steps = [events[at : at + 4] for at in range(0, len(events), 4)]
    copied = [[copy for event in step for copy in ahead_of_known(event)] for step in steps]
    for step, copies in zip(steps, copied, strict=True):
        loads = [event.load for event in step]
        assert all(load is not None for load in loads)
        assert all(load and c.expert in load.experts for c in copies for load in [loads[c.layer]])
    # The prompt, and later steps; before the first layer too.
    assert len(copied[0]) >= 4
    assert {c.layer for copies in copied[1:] for c in copies} == {*range(HASHED)}
    assert any(c.layer == 0 for step in steps[1:] for c in step[0].step_copies)

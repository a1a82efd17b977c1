"""Tests of a link as fast as the memory that it shares: prompts do not become slower."""

import dataclasses

import pytest

from tandem.hardware.profiles import load_profile
from tandem.policy.plan import Geometry
from tandem.policy.settings import PlannerSettings
from tandem.sim.replay import ReplaySettings, replay
from tandem.sim.typical_routing import typical_routing

GEOMETRY = Geometry(4, 64, 4)
LINK_BYTES_PER_SECOND = 55e9


@pytest.mark.parametrize("slowdown", [1.15, 1.6])
def test_a_prompt_takes_no_longer_than_if_all_were_fetched(slowdown: float) -> None:
    desktop = load_profile("desktop-24gb")
    shape = desktop.shape("qwen3-30b-a3b")
    shape = dataclasses.replace(
        shape,
        num_moe_layers=GEOMETRY.num_layers, num_experts=GEOMETRY.num_experts, top_k=GEOMETRY.top_k,
        link_seconds_per_expert=shape.expert_bytes / LINK_BYTES_PER_SECOND,
    )  # fmt: skip
    profile = dataclasses.replace(
        desktop,
        cpu_slowdown_while_copying=slowdown, link_slowdown_while_computing=slowdown,
    )  # fmt: skip
    trace, seconds = typical_routing(GEOMETRY, num_sequences=1, num_tokens=256), {}
    for assignment in ("balanced", "gpu-only"):
        settings = PlannerSettings(assignment=assignment, copies_prompts=True)
        run = ReplaySettings(
            settings=settings, profile=profile, shape=profile.charged(shape, "graph"),
            num_slots=GEOMETRY.num_layers * GEOMETRY.num_experts // 4, prompt=255, compare_every=0,
        )  # fmt: skip
        seconds[assignment] = replay(trace, run).prefill_seconds
    assert seconds["balanced"] < 1.02 * seconds["gpu-only"]

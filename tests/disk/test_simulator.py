"""Tests that a running model's host slots have the hits and misses of the simulator."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tandem
from tandem.decode.cpu_slots import CpuSlotPool
from tandem.experts.cache.policy_tables import host_slot_eviction
from tandem.experts.execution.forced_routing import ForcedRouting
from tandem.hf.config import OffloadConfig
from tandem.hf.disk_tier import slots_over
from tandem.policy.plan import Geometry
from tandem.policy.reads import is_prompt
from tandem.recording.recorded_graph import RecordedGraph
from tandem.sim.hit_rate import DemandCache
from tandem.sim.steps import LoadReader, Step
from tandem.sim.typical_routing import typical_routing
from tandem.trace import RoutingTrace
from tests.disk.loading import EXPERTS, LAYERS, TOP_K, slots_of, with_share
from tests.inside import runtime_in

GEOMETRY = Geometry(num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K)
PROMPT, STEPS = 9, 150


class NotedRouting(ForcedRouting):
    """Forced routing that records the tokens of each step."""

    def __init__(self, model: Any, trace: RoutingTrace) -> None:
        super().__init__(runtime_in(model).executor, trace)
        self.steps: list[Step] = []

    def _take(self, num_tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        taken = super()._take(num_tokens)
        self.steps.append(Step(taken, False, num_tokens))
        return taken


def run_live(model: Any, trace: RoutingTrace, eviction: str) -> list[Step]:
    """Answer with empty slots and the trace's routing; return the steps."""
    pool = tandem.Generator(model, speculate="none").slot_pool(1, capacity=PROMPT + STEPS)
    memory = str(slots_of(model).num_bytes + 1)
    assert slots_over(model, OffloadConfig(expert_memory=memory, eviction=eviction))
    routing = NotedRouting(model, trace)
    runtime_in(model).use(routing)
    tokens = torch.arange(PROMPT + STEPS).remainder(50).add(4).tolist()
    pool.prefill({0: tokens[:PROMPT]})
    for token in tokens[PROMPT:]:
        pool.decode({0: token})
    assert isinstance(pool, CpuSlotPool)
    assert pool.step is not None
    assert isinstance(pool.step.recording, RecordedGraph)
    return routing.steps


@pytest.mark.parametrize("eviction", ["next-use", "lru"])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_live_and_simulated_slots_miss_the_same(
    packed: Path, share: float, eviction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without look-ahead, which the simulation does not have."""
    monkeypatch.setattr("tandem.decode.cpu_slots.look_ahead_over_disk", lambda _: None)
    trace = typical_routing(GEOMETRY, num_sequences=1, num_tokens=2 * (PROMPT + STEPS))
    model = with_share(packed, share, eviction=eviction)
    steps = run_live(model, trace, eviction)
    live = slots_of(model).statistics()
    cache = DemandCache(
        GEOMETRY,
        slots_of(model).num_slots,
        host_slot_eviction(eviction)(GEOMETRY, slots_of(model).num_slots[0]),
    )
    reader, demands, misses = LoadReader(trace), 0, 0
    for step in steps:
        cache.begin_step(is_prefill=is_prompt(len(step.tokens)))
        for load in reader.loads(step):
            absent, _ = cache.use(load)
            demands, misses = demands + len(load.experts), misses + len(absent)
    assert live.misses == misses
    assert 0 < misses < demands
    # A step that is recorded runs twice: the second time its experts are present.
    again = live.hits + live.misses - demands
    assert again % (GEOMETRY.num_layers * GEOMETRY.top_k) == 0

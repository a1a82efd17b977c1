"""Tests of layers with all experts on the GPU, unplanned: the kernels run interpreted."""

from types import ModuleType

import pytest
import torch

from tandem.devices.cuda.resident import MAX_TOKENS, ResidentLayers
from tandem.experts.store.host_store import HostStore
from tandem.experts.tracing.events import LayerExecuted
from tandem.kernels.reference import expert_ffn
from tandem.policy.settings import PlannerSettings
from tests.experts.lazy_streams import LazyStreams
from tests.experts.machines import FUNCTIONS, GEOMETRY, gate, make_executor, route
from tests.kernels.interpreter import interpreted_module

pytest.importorskip("triton")
Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
NUM_EXPERTS = GEOMETRY.num_layers * GEOMETRY.num_experts


triton_experts = interpreted_module("tandem.triton_kernels.experts")


def resident_layers(store: HostStore, triton_experts: ModuleType, num_slots: int) -> ResidentLayers:
    num_slots = PlannerSettings().slots_for(num_slots)
    executor = make_executor(store, num_slots, resident=range(NUM_EXPERTS))
    return ResidentLayers(executor.cache, triton_experts.TritonExperts(), LazyStreams())


def of_the_reference(store: HostStore, layer: int, call: Call) -> torch.Tensor:
    hidden, index, weights = call
    expected = torch.zeros_like(hidden)
    for token in range(len(hidden)):
        for k, expert in enumerate(index[token].tolist()):
            if expert < GEOMETRY.num_experts:
                row = expert_ffn(hidden[token, None], store[layer].weights(expert), gate)
                expected[token] += weights[token, k] * row[0]
    return expected


@pytest.mark.parametrize("num_tokens", [1, 3, MAX_TOKENS + 1, 70])
def test_results_are_those_of_the_reference(
    store: HostStore, triton_experts: ModuleType, num_tokens: int
) -> None:
    layers = resident_layers(store, triton_experts, NUM_EXPERTS)
    call = route(num_tokens, torch.Generator().manual_seed(3))
    call[1][0, 1] = GEOMETRY.num_experts  # padding of a router
    for layer in range(GEOMETRY.num_layers):
        assert layers.serves(FUNCTIONS)
        found, expected = (
            layers.execute(layer, *call, FUNCTIONS),
            of_the_reference(store, layer, call),
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_only_what_stays_resident_is_served(store: HostStore, triton_experts: ModuleType) -> None:
    assert not resident_layers(store, triton_experts, NUM_EXPERTS - 1).serves(FUNCTIONS)


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_a_planned_step_asks_nothing_of_the_host_for_them(
    store: HostStore, triton_experts: ModuleType, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts too: the router's choice is copied to the host only for listeners."""
    num_slots = PlannerSettings().slots_for(NUM_EXPERTS)
    executor = make_executor(store, num_slots, resident=range(NUM_EXPERTS))
    whole = ResidentLayers(executor.cache, triton_experts.TritonExperts(), LazyStreams())
    monkeypatch.setattr(executor.device, "resident", lambda cache: whole)
    monkeypatch.setattr(executor.device, "download", None)
    executor.resize_now(num_slots, range(NUM_EXPERTS))
    call = route(num_tokens, torch.Generator().manual_seed(5))
    events: list[LayerExecuted] = []
    executor.listeners.append(events.append)
    for layer in range(GEOMETRY.num_layers):
        found, expected = (
            executor.execute(layer, *call, FUNCTIONS),
            of_the_reference(store, layer, call),
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    executor.catch_up()
    assert [event.layer for event in events] == [*range(GEOMETRY.num_layers)]
    assert all(event.plan is not None and not event.plan.cpu for event in events)
    executor.resize_now(num_slots - 1)
    assert not whole.serves(FUNCTIONS)

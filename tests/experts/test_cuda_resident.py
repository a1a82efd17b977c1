"""Layers that are all on the GPU, without a plan: the kernels interpreted on the CPU."""

from types import ModuleType

import pytest
import torch

from tandem.devices.cuda.resident import MAX_TOKENS, ResidentLayers
from tandem.experts.store.host_store import HostStore
from tandem.kernels.reference import expert_ffn
from tandem.policy.settings import PlannerSettings
from tests.experts.machines import FUNCTIONS, GEOMETRY, gate, make_executor, route
from tests.kernels.interpreter import interpreted_module

pytest.importorskip("triton")
NUM_EXPERTS = GEOMETRY.num_layers * GEOMETRY.num_experts


triton_experts = interpreted_module("tandem.triton_kernels.experts")


def resident_layers(store: HostStore, triton_experts: ModuleType, num_slots: int) -> ResidentLayers:
    num_slots += PlannerSettings().extra_slots(num_slots)
    executor = make_executor(store, num_slots, resident=range(NUM_EXPERTS))
    return ResidentLayers(executor.cache, triton_experts.TritonExperts(), torch.device("cpu"))


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_results_are_those_of_the_reference(
    store: HostStore, triton_experts: ModuleType, num_tokens: int
) -> None:
    layers = resident_layers(store, triton_experts, NUM_EXPERTS)
    hidden, index, weights = route(num_tokens, torch.Generator().manual_seed(3))
    index[0, 1] = GEOMETRY.num_experts  # padding of a router
    for layer in range(GEOMETRY.num_layers):
        assert layers.serves(FUNCTIONS, num_tokens)
        expected = torch.zeros_like(hidden)
        for token in range(num_tokens):
            for k, expert in enumerate(index[token].tolist()):
                if expert < GEOMETRY.num_experts:
                    row = expert_ffn(hidden[token, None], store[layer].weights(expert), gate)
                    expected[token] += weights[token, k] * row[0]
        found = layers.execute(layer, hidden, index, weights, FUNCTIONS)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_only_what_stays_resident_is_served(store: HostStore, triton_experts: ModuleType) -> None:
    assert not resident_layers(store, triton_experts, NUM_EXPERTS - 1).serves(FUNCTIONS, 1)
    assert not resident_layers(store, triton_experts, NUM_EXPERTS).serves(FUNCTIONS, MAX_TOKENS + 1)

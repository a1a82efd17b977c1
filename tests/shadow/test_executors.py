"""Tests of the hybrid executor with CUDA's streams, events and copies: events order all."""

import pytest
import torch

from tandem.experts.store.host_store import HostStore
from tandem.policy.settings import PlannerSettings
from tests.experts.machines import FUNCTIONS, make_store, route
from tests.policy.integrity import check_integrity
from tests.shadow.device import shadow_gpu
from tests.shadow.executors import NUM_EXPERTS, SETTINGS, make_executor, run_steps


@pytest.fixture(scope="module")
def store() -> HostStore:
    return make_store(expert_dtype=None)


@pytest.mark.parametrize("num_slots", [1, 3, NUM_EXPERTS])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s.assignment}-{s.eviction}")
def test_whatever_is_copied_events_keep_the_order(
    store: HostStore, settings: PlannerSettings, num_slots: int
) -> None:
    with shadow_gpu(kernels="none") as gpu:
        executor = make_executor(store, num_slots, settings)
        run_steps(executor, store)
        check_integrity(executor.cache.planner.residency)
        executor.close()
        del executor
        assert gpu.registered_bytes == 0


def test_a_layer_waits_once_for_its_router(store: HostStore) -> None:
    """It waits for an event, which torch allows; any other wait raises."""
    with shadow_gpu(kernels="none"):
        executor = make_executor(store)
        run_steps(executor, store, steps=2)
        call = route(3, torch.Generator().manual_seed(1))
        hidden, index, weights = (tensor.to("cuda") for tensor in call)
        torch.cuda.set_sync_debug_mode("error")
        executor.execute(0, hidden, index, weights, FUNCTIONS)
        torch.cuda.set_sync_debug_mode("default")
        executor.close()

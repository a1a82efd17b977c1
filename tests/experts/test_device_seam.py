"""Tests of the device's side of a layer: tokens stay there, and host tokens are copied once."""

import pytest
import torch
from torch import Tensor

from tandem.devices.emulated import EmulatedDevice
from tandem.experts.cache.copy_engine import VirtualCopyEngine
from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.cache.slots import SlotUse
from tandem.experts.execution.batch import CallSide, ExpertBatch
from tandem.experts.execution.executor import CpuExecutor
from tandem.experts.execution.expert_kernels import ExpertKernels
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.experts.execution.layer_call import LayerCall
from tandem.experts.execution.routing import Routing, SumRows
from tandem.experts.execution.row_memory import RowMemory
from tandem.experts.tracing.events import LayerExecuted
from tandem.kernels.dense import CpuThreads
from tandem.policy.settings import PlannerSettings
from tandem.sim.timeline import Timeline
from tests.experts.machines import FUNCTIONS, GEOMETRY, make_machine, make_store, route


class SpoiltRows(RowMemory):
    """Fills all memory that it returns with garbage."""

    def __call__(self, num_rows: int, width: int) -> Tensor:
        return super().__call__(num_rows, width).fill_(torch.nan)


class WatchedDevice(EmulatedDevice):
    """Returns memory with garbage, and records what is copied to it."""

    def __init__(self) -> None:
        super().__init__(1 << 30, ExpertKernels(CpuThreads(num_threads=1)))
        self.rows, self.host_rows = SpoiltRows(), SpoiltRows()
        self.uploads: list[int] = []
        self.sums = 0

    def launch(self, batch: ExpertBatch, use: SlotUse) -> None:
        self._require_own(batch.out)
        super().launch(batch, use)

    def upload(self, source: Tensor, target: Tensor) -> None:
        self._require_own(target)
        assert not source.isnan().any(), "rows are uploaded that nobody computed"
        self.uploads.append(len(source))
        super().upload(source, target)

    def prepare_sum(self, row_of: Tensor, weights: Tensor) -> SumRows:
        sum_rows = super().prepare_sum(row_of, weights)

        def watched(rows: Tensor) -> Tensor:
            self._require_own(rows)
            assert not rows.isnan().any(), "a row is missing on the device"
            self.sums += 1
            return sum_rows(rows)

        return watched

    def _require_own(self, rows: Tensor) -> None:
        assert self.rows.holds(rows), "rows of the device lie elsewhere"


def test_host_rows_are_copied_to_the_device_once_a_layer_and_added_there() -> None:
    store, machine, device = make_store(), make_machine(link=9.0), WatchedDevice()
    clock = Timeline(machine.profile, machine.shape)
    settings = PlannerSettings()
    cache = ExpertCache(store, device, clock, GEOMETRY, machine, settings, VirtualCopyEngine)
    cache.resize(8, [0, 1, 2, 8, 9, 10])
    executor, alone = (
        HybridExecutor(cache, device, ExpertKernels(CpuThreads(num_threads=1))),
        CpuExecutor(store),
    )
    events: list[LayerExecuted] = []
    executor.listeners.append(events.append)
    generator = torch.Generator().manual_seed(0)
    for batch in [1, 4, 1, 1, 3] * 4:
        for layer in range(GEOMETRY.num_layers):
            call = route(batch, generator)
            expected = alone.execute(layer, *call, FUNCTIONS)
            assert torch.equal(executor.execute(layer, *call, FUNCTIONS), expected)
    plans = [(event.load, event.plan) for event in events]
    wanted = []
    for load, plan in plans:
        assert load is not None
        assert plan is not None
        tokens = dict(zip(load.experts, load.tokens, strict=True))
        if plan.cpu and len(plan.cpu) < len(load.experts):
            wanted.append(sum(tokens[expert] for expert in plan.cpu))
    assert device.uploads == wanted != []
    assert device.sums == sum(len(p.cpu) < len(d.experts) for d, p in plans if d and p)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_a_batch_reads_its_own_tokens_in_their_dtype(dtype: torch.dtype, num_tokens: int) -> None:
    """The bits are those of fp32; other tokens, NaN here, are not read."""
    store = make_store()
    hidden, index, _ = route(num_tokens, torch.Generator().manual_seed(2))
    routing = Routing(index, GEOMETRY.num_experts)
    call = LayerCall(store[0], FUNCTIONS, routing, routing.experts)
    hidden, found = hidden.to(dtype), []
    for tokens in (hidden, hidden.float()):
        rows = torch.zeros(routing.num_routed, tokens.shape[1])
        batch = call.batch(1, 3, CallSide(tokens.clone(), rows))
        others = torch.ones(num_tokens, dtype=torch.bool)
        others[batch.token.long()] = False
        batch.side.hidden[others] = torch.nan
        ExpertKernels(CpuThreads(num_threads=2)).run(batch)
        found.append(rows)
    assert found[0].any()
    assert torch.equal(*found)

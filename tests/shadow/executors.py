"""The hybrid executor on the shadow device with the real streams, without a model."""

import torch
from torch import Tensor

from tandem.devices.cuda.copies import CudaCopyEngine, Link
from tandem.devices.cuda.device import CudaDevice
from tandem.devices.cuda.kernels import TorchKernels
from tandem.devices.cuda.streams import CudaStreams
from tandem.experts.cache.clock import Clock, WallClock
from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.cache.slots import Slots
from tandem.experts.execution.executor import CpuExecutor
from tandem.experts.execution.expert_kernels import ExpertKernels
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.experts.store.host_store import HostStore
from tandem.experts.store.pinning import pin_store
from tandem.kernels.dense import CpuThreads
from tandem.policy.plan import Geometry
from tandem.policy.settings import PlannerSettings
from tandem.sim.systems import SimulatedSettings
from tests.experts.machines import FUNCTIONS, GEOMETRY, make_machine, route

NUM_EXPERTS = GEOMETRY.num_layers * GEOMETRY.num_experts
# Under these every kind of copy and every stream occurs.
FETCHING = PlannerSettings(
    assignment="gpu-only", eviction="lru", prediction="none", prefetch="none"
)
SETTINGS = (
    PlannerSettings(),
    FETCHING,
    PlannerSettings(assignment="hits-on-gpu", eviction="copy-on-miss", prediction="none"),
    SimulatedSettings(
        assignment="dali", prediction="popularity", prefetch="top-k", prefetch_count=3
    ),
)


def make_executor(
    store: HostStore, num_slots: int = 3, settings: PlannerSettings = FETCHING
) -> HybridExecutor:
    """Return an executor on the current GPU, with the store pinned."""
    wall, streams = WallClock(), CudaStreams()
    device = CudaDevice(streams, TorchKernels(), on_busy=wall.add_gpu, is_watched=wall.is_watched)
    pin_store(store, device.pin, is_mapped=lambda tensor: False)

    def make_engine(
        store: HostStore, slots: Slots, geometry: Geometry, clock: Clock
    ) -> CudaCopyEngine:
        return CudaCopyEngine(store, slots, geometry, wall, streams, device.events, Link(1e9))

    machine = make_machine(cpu=2e-5, gpu=1e-5, link=2e-5, dense=1e-4)
    cache = ExpertCache(store, device, wall, GEOMETRY, machine, settings, make_engine)
    cache.resize(num_slots)
    return HybridExecutor(cache, device, ExpertKernels(CpuThreads(num_threads=1)))


def run_steps(executor: HybridExecutor, store: HostStore, *, steps: int = 8) -> None:
    """Run a prompt and steps on the GPU and on the CPU; assert that all results are equal."""
    alone, generator = CpuExecutor(store, CpuThreads(num_threads=1)), torch.Generator()
    outs, expected = list[Tensor](), list[Tensor]()
    generator.manual_seed(7)
    for step in range(steps):
        num_tokens = 12 if step == 0 else 3
        executor.begin_step(list(range(num_tokens)), is_prefill=step == 0)
        for layer in range(GEOMETRY.num_layers):
            call = route(num_tokens, generator)
            outs.append(on_gpu(executor, layer, call))
            expected.append(alone.execute(layer, *call, FUNCTIONS))
    for out, wanted in zip(outs, expected, strict=True):
        torch.testing.assert_close(out.cpu(), wanted, rtol=1e-5, atol=1e-5)


def on_gpu(executor: HybridExecutor, layer: int, call: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Execute a layer whose tensors are on the GPU, as in a model."""
    hidden, index, weights = (tensor.to("cuda") for tensor in call)
    return executor.execute(layer, hidden, index, weights, FUNCTIONS)

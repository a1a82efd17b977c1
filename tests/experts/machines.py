"""Small stores and made-up machines for tests that call the executors directly."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.experts.cache.clock import Clock, WallClock
from tandem.experts.cache.copy_engine import VirtualCopyEngine
from tandem.experts.cache.expert_cache import ExpertCache, Machine
from tandem.experts.cache.slots import Slots
from tandem.experts.execution.batch import ExpertFunctions
from tandem.experts.execution.expert_kernels import ExpertKernels
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.experts.store.host_store import HostStore
from tandem.kernels.dense import CpuThreads
from tandem.kernels.formats.weight_format import find_format
from tandem.kernels.native import ActivationKind, NativeActivation
from tandem.policy.cost import HardwareProfile, ShapeCosts
from tandem.policy.plan import Geometry
from tandem.policy.settings import PlannerSettings
from tandem.sim.timeline import Timeline
from tests.experts.copy_thread import CopyThread
from tests.experts.faults import Disturbance, DisturbedLink, FaultyDevice
from tests.experts.twin_steps import TwinExecutor

HIDDEN, INTERMEDIATE = 32, 32
GEOMETRY = Geometry(2, 8, 3)
ACTIVATION = NativeActivation(ActivationKind.SWIGLU)


def gate(rows: Tensor) -> Tensor:
    first, second = rows.chunk(2, dim=-1)
    return torch.nn.functional.silu(first) * second


FUNCTIONS = ExpertFunctions(activate=gate, native=ACTIVATION, unpacked_activate=gate)


def make_store(geometry: Geometry = GEOMETRY, expert_dtype: str | None = "int8") -> HostStore:
    """Return random, distinct experts; with `expert_dtype` None they are plain fp32."""
    generator = torch.Generator().manual_seed(0)
    store = HostStore()
    shapes: dict[str, tuple[int, ...]] = {
        "gate_up_proj": (geometry.num_experts, 2 * INTERMEDIATE, HIDDEN),
        "down_proj": (geometry.num_experts, HIDDEN, INTERMEDIATE),
    }
    packed = None if expert_dtype is None else find_format(expert_dtype)
    for layer in range(geometry.num_layers):
        host = store.add_layer(f"layers.{layer}.experts", shapes, expert_dtype=packed)
        for name, shape in shapes.items():
            host.put(name, torch.randn(shape, generator=generator) / 4)
    return store


def make_machine(
    geometry: Geometry = GEOMETRY,
    *,
    cpu: float = 1.0,
    gpu: float = 0.2,
    link: float = 2.0,
    dense: float = 1.0,
    cpu_slowdown: float = 1.1,
    link_slowdown: float = 1.2,
    expert_bytes: int = 4096,
) -> Machine:
    """Return a machine whose unit of time is one token's expert on the CPU."""
    tokens = (1, 2, 4, 8, 16, 64)
    shape = ShapeCosts(
        shape="test",
        num_moe_layers=geometry.num_layers,
        num_experts=geometry.num_experts,
        top_k=geometry.top_k,
        expert_bytes=expert_bytes,
        tokens=tokens,
        cpu_seconds=tuple(cpu * (0.5 + 0.5 * n) for n in tokens),
        gpu_seconds=tuple(gpu * (0.9 + 0.1 * n) for n in tokens),
        dense_seconds=tuple(dense for _ in tokens),
        cpu_first_expert_seconds=0.1 * cpu,
        link_seconds_per_expert=link,
    )
    profile = HardwareProfile(
        name="test",
        source="made up",
        cpu="none",
        gpu="none",
        cpu_threads=1,
        gpu_memory_bytes=1 << 30,
        host_memory_bytes=1 << 30,
        link_bytes_per_second=1e9,
        cpu_slowdown_while_copying=cpu_slowdown,
        link_slowdown_while_computing=link_slowdown,
        shapes=(shape,),
    )
    return Machine(profile, shape)


def make_executor(
    store: HostStore,
    num_slots: int,
    settings: PlannerSettings | None = None,
    *,
    machine: Machine | None = None,
    geometry: Geometry = GEOMETRY,
    resident: Sequence[int] = (),
    device_bytes: int = 1 << 30,
    in_graph: bool = False,
) -> HybridExecutor:
    """Return a hybrid executor on the emulated device and the virtual clock."""
    machine = machine or make_machine(geometry)
    kernels = ExpertKernels(CpuThreads(num_threads=1))
    device = FaultyDevice(device_bytes, kernels)
    cache = ExpertCache(
        store,
        device,
        Timeline(machine.profile, machine.shape),
        geometry,
        machine,
        settings or PlannerSettings(),
        VirtualCopyEngine,
    )
    cache.resize(num_slots, resident)
    return TwinExecutor(cache, device, kernels, in_graph=in_graph)


def make_real_executor(
    store: HostStore,
    num_slots: int,
    settings: PlannerSettings | None = None,
    *,
    geometry: Geometry = GEOMETRY,
    disturbance: Disturbance | None = None,
    bytes_per_second: float | None = None,
    cpu: float = 2e-5,
) -> HybridExecutor:
    """Return a hybrid executor with a copy thread and a device thread, on the wall clock."""
    machine = make_machine(geometry, cpu=cpu, gpu=1e-5, link=2e-5, dense=1e-4)
    clock = WallClock()

    def make_engine(store: HostStore, slots: Slots, geometry: Geometry, clock: Clock) -> CopyThread:
        assert isinstance(clock, WallClock)
        parts = (store, slots, geometry, clock)
        if disturbance is None:
            return CopyThread(*parts, bytes_per_second=bytes_per_second)
        return DisturbedLink(*parts, bytes_per_second=bytes_per_second, disturbance=disturbance)

    device_kernels = ExpertKernels(CpuThreads(num_threads=1), on_busy=clock.add_gpu)
    device = FaultyDevice(1 << 30, device_kernels, has_thread=True)
    cache = ExpertCache(
        store,
        device,
        clock,
        geometry,
        machine,
        settings or PlannerSettings(),
        make_engine,
    )
    cache.resize(num_slots)
    kernels = ExpertKernels(CpuThreads(num_threads=1), on_busy=clock.add_cpu)
    return TwinExecutor(cache, device, kernels)


def route(
    num_tokens: int, generator: torch.Generator, geometry: Geometry = GEOMETRY
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random (hidden, top_k_index, top_k_weights)."""
    scores = torch.rand(num_tokens, geometry.num_experts, generator=generator)
    weights, index = scores.topk(geometry.top_k)
    return torch.randn(num_tokens, HIDDEN, generator=generator), index, weights

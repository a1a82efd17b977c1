"""The executors' cost beside the arithmetic: python -m benchmarks.runtime.overhead

Three questions. How long do planning and bookkeeping take per layer at batch 1, live? Real routing
runs through the hybrid executor with a device, kernels and a link that do nothing; the virtual
clock's time is subtracted. What does a layer of tiny experts cost on the emulated device? And what
does an all-CPU layer of Qwen3-30B-A3B's shape take through `CpuExecutor`, against the kernels?
Medians.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tests.experts.copy_thread import CopyThread
from tests.experts.threaded_device import ThreadedDevice
from tests.experts.twin_steps import TwinExecutor, TwinSteps

from tandem.devices.emulated import EmulatedDevice
from tandem.experts.cache.clock import WallClock
from tandem.experts.cache.copy_engine import VirtualCopyEngine
from tandem.experts.cache.expert_cache import EngineMaker, ExpertCache, Machine
from tandem.experts.cache.slots import Claim, MemoryPool, Slots, SlotUse
from tandem.experts.execution.batch import ExpertBatch, ExpertFunctions
from tandem.experts.execution.executor import CpuExecutor, Executor
from tandem.experts.execution.expert_kernels import ExpertKernels, StartedWork, WeightSource
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.experts.execution.routed_layers import native_layer
from tandem.experts.execution.routing import SumRows
from tandem.experts.store.host_store import HostStore
from tandem.experts.store.packed_layer import PackedLayer
from tandem.experts.tracing.cache_statistics import CacheStatistics
from tandem.hardware.profiles import load_profile, shape_for
from tandem.kernels.dense import CpuThreads
from tandem.kernels.formats.weight_format import find_format
from tandem.kernels.native import ActivationKind, NativeActivation, compute_experts
from tandem.policy.plan import Geometry
from tandem.sim.systems import TANDEM
from tandem.sim.timeline import Timeline
from tandem.trace import RoutingTrace, read_trace

TRACES = Path(__file__).parents[2] / "data" / "traces"
TINY = 32
QWEN_HIDDEN, QWEN_INTERMEDIATE, QWEN_EXPERTS, QWEN_TOP_K = 2048, 768, 128, 8


def silu_gate(rows: torch.Tensor) -> torch.Tensor:
    """Return the gated activation in torch; the kernels have it natively."""
    gate, up = rows.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


FUNCTIONS = ExpertFunctions(silu_gate, native=NativeActivation(ActivationKind.SWIGLU))


def make_store(geometry: Geometry, hidden: int, inner: int, name: str) -> HostStore:
    """Return random packed experts."""
    store = HostStore()
    shapes: dict[str, tuple[int, ...]] = {
        "gate_up_proj": (geometry.num_experts, 2 * inner, hidden),
        "down_proj": (geometry.num_experts, hidden, inner),
    }
    for layer in range(geometry.num_layers):
        host = store.add_layer(f"layer {layer}", shapes, expert_dtype=find_format(name))
        host.buffers.random_(0, 60)  # type: ignore[union-attr]
    return store


def replay_seconds(
    executor: Executor, trace: RoutingTrace, steps: int, hidden_size: int = TINY, first: int = 0
) -> list[float]:
    """Return the seconds of every layer for some of the trace's tokens at batch 1."""
    hidden = torch.randn(1, hidden_size)
    seconds = []
    ids = trace.token_ids
    for token in range(first, first + steps):
        executor.begin_step([token if ids is None else int(ids[token])], is_prefill=False)
        index = torch.from_numpy(trace.experts[token].astype("int64"))[:, None]
        weights = torch.full(index.shape, 0.125)
        for layer in range(trace.meta.n_moe_layers):
            begin = time.perf_counter()
            executor.execute(layer, hidden, index[layer], weights[layer], FUNCTIONS)
            seconds.append(time.perf_counter() - begin)
    return seconds


class SilentKernels(ExpertKernels):
    """Computes nothing, so that only bookkeeping is left."""

    def wake(self) -> None:
        """Do nothing."""

    def start(self, batch: ExpertBatch, source: WeightSource | None = None) -> StartedWork:
        """Return work that is done."""
        return StartedWork(lambda: None, batch, None, 0.0)

    def run(self, batch: ExpertBatch, source: WeightSource | None = None) -> None:
        """Do nothing."""


class SilentDevice(EmulatedDevice):
    """Launches, uploads and sums nothing."""

    _sums = torch.zeros(1, TINY)  # of a token, as eager code adds them up

    def launch(self, batch: ExpertBatch, use: SlotUse) -> None:
        """Release the slots."""
        use.addresses()
        use.end()

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Do nothing."""

    def prepare_sum(self, row_of: torch.Tensor, weights: torch.Tensor) -> SumRows:
        """Return a function that returns the same sums each time."""
        return lambda rows: self._sums


class SilentCopies(VirtualCopyEngine):
    """Keeps the order of the copies and moves no bytes."""

    def _write(self, claim: Claim) -> None:
        self._pending.pop(claim)
        self.slots.land([claim])


class Parts:
    """Median times of a layer's parts, by name."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def time(self, owner: Any, method: str, name: str) -> None:
        """Time every further call of a method."""
        inner, seconds = getattr(owner, method), self._seconds.setdefault(name, [])

        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            found = inner(*args, **options)
            seconds.append(time.perf_counter() - begin)
            return found

        setattr(owner, method, timed)

    def count(self, name: str) -> int:
        """Return how often a part was called."""
        return len(self._seconds[name])

    def microseconds(self) -> dict[str, float]:
        """Return the medians."""
        return {name: median(seconds) * 1e6 for name, seconds in self._seconds.items()}


def trace_and_machine() -> tuple[RoutingTrace, Machine]:
    """Return real routing, and a machine with the costs of its model."""
    trace, profile = read_trace(TRACES / "deepseek-v2-lite.npz"), load_profile("laptop-8gb")
    return trace, Machine(profile, shape_for(profile, trace.meta.model, trace.meta.geometry))


def virtual_cache(
    store: HostStore,
    device: MemoryPool,
    geometry: Geometry,
    machine: Machine,
    make_engine: EngineMaker = SilentCopies,
) -> ExpertCache:
    """Return a cache on the virtual clock."""
    clock = Timeline(machine.profile, machine.shape)
    return ExpertCache(store, device, clock, geometry, machine, TANDEM, make_engine)


def fill(cache: ExpertCache, share: float) -> None:
    """Give a share of the experts slots; a share of 1 makes all resident from the start."""
    count = cache.geometry.num_layers * cache.geometry.num_experts
    if share == 1.0:
        cache.resize(cache.settings.slots_for(count), range(count))
    else:
        cache.resize(round(share * count))


def bookkeeping(steps: int, share: float) -> dict[str, float]:
    """Return microseconds per layer of everything but arithmetic, copies and the clock."""
    trace, machine = trace_and_machine()
    geometry = trace.meta.geometry
    kernels = SilentKernels(CpuThreads(num_threads=1))
    device = SilentDevice(1 << 30, kernels)
    cache = virtual_cache(make_store(geometry, TINY, TINY, "int8"), device, geometry, machine)
    fill(cache, share)
    hybrid = HybridExecutor(cache, device, kernels)
    replay_seconds(hybrid, trace, steps)  # the cache and the policies' tables fill
    whole = median(replay_seconds(hybrid, trace, steps)) * 1e6
    statistics, parts = CacheStatistics(), Parts()
    hybrid.listeners.append(statistics)
    parts.time(cache.planner, "plan", "plan")
    parts.time(cache.planner, "learn", "learn")
    parts.time(cache.clock, "run", "clock")
    replay_seconds(hybrid, trace, steps)
    found = parts.microseconds()
    bookkeeping = whole - found.pop("clock")
    return {
        "planning_and_bookkeeping": bookkeeping,
        "before_the_lanes_start": bookkeeping - found["learn"],
        **found,
        "hit_rate": statistics.hit_rate,
    }


def on_the_emulated_device(steps: int, share: float) -> dict[str, float]:
    """Return microseconds of a layer of tiny experts: on the CPU, planned on both, captured.

    The three take turns step by step; a captured layer includes its share of the step's begin and
    end.
    """
    trace, machine = trace_and_machine()
    geometry, store = trace.meta.geometry, make_store(trace.meta.geometry, TINY, TINY, "int8")
    threads = CpuThreads(num_threads=1)
    kernels = ExpertKernels(threads)
    devices = EmulatedDevice(1 << 30, kernels), ThreadedDevice(1 << 30, kernels, has_thread=True)
    virtual = virtual_cache(store, devices[0], geometry, machine, VirtualCopyEngine)
    clock = WallClock()

    def copies(store: HostStore, slots: Slots, geometry: Geometry, _: object) -> CopyThread:
        return CopyThread(store, slots, geometry, clock)

    real = ExpertCache(store, devices[1], clock, geometry, machine, TANDEM, copies)
    native = [layer for host in store if (layer := native_layer(host, FUNCTIONS)) is not None]
    planned = HybridExecutor(virtual, devices[0], kernels)
    captured = TwinExecutor(real, devices[1], kernels)
    captured.captured = TwinSteps(real, native, threads, torch.float32)
    fill(virtual, share)
    fill(real, share)
    alone = CpuExecutor(store, CpuThreads(num_threads=1))
    executors: list[Executor] = [alone, planned, captured]
    seconds: list[list[float]] = [[], [], []]
    for step in range(2 * steps):
        for executor, times in zip(executors, seconds, strict=True):
            begin = time.perf_counter()
            replay_seconds(executor, trace, 1, first=step)
            if step >= steps:  # the caches have filled
                times.append((time.perf_counter() - begin) / geometry.num_layers)
    captured.close()
    found = dict[str, float]()
    for name, at in (("", 0.5), ("_best_tenth", 0.1)):  # where others use the cores too
        cpu, both, through = (sorted(times)[int(at * len(times))] * 1e6 for times in seconds)
        found |= {
            f"one_native_call{name}": cpu,
            f"planned_difference{name}": both - cpu,
            f"captured_difference{name}": through - cpu,
        }
    return found


def through_executor(name: str, threads: int, repetitions: int, layers: int) -> dict[str, float]:
    """Return microseconds of a Qwen3-30B-A3B layer at batch 1: kernels alone, and the executor.

    Both read every expert of the store, half a round apart, so that neither finds the other's in
    the cache. The turns are in the order A B B A: each follows itself as often as the other, whose
    threads may still be awake.
    """
    geometry = Geometry(layers, QWEN_EXPERTS, QWEN_TOP_K)
    store = make_store(geometry, QWEN_HIDDEN, QWEN_INTERMEDIATE, name)
    executor = CpuExecutor(store, CpuThreads(num_threads=threads))
    calls = (_kernel_calls(store, executor), _executor_calls(store, executor))
    seconds: tuple[list[float], list[float]] = ([], [])
    num_places = geometry.num_layers * QWEN_EXPERTS // QWEN_TOP_K
    for turn in range(2 * repetitions):
        for side in (0, 1) if turn % 2 else (1, 0):
            place = (turn + side * num_places // 2) % num_places
            layer, first = divmod(place * QWEN_TOP_K, QWEN_EXPERTS)
            call = calls[side](layer, torch.arange(first, first + QWEN_TOP_K))
            begin = time.perf_counter()
            call()
            seconds[side].append(time.perf_counter() - begin)
    kernels, through = (median(times) * 1e6 for times in seconds)
    return {"kernels": kernels, "executor": through, "overhead": through / kernels - 1.0}


PrepareCall = Callable[[int, torch.Tensor], Callable[[], object]]


def _kernel_calls(store: HostStore, executor: CpuExecutor) -> PrepareCall:
    """Return a function that prepares a call of the kernels on the executor's own threads."""
    engine, activation = executor._kernels.threads.engine, FUNCTIONS.native
    assert activation is not None
    hidden, out = torch.randn(1, QWEN_HIDDEN), torch.empty(QWEN_TOP_K, QWEN_HIDDEN)
    begin = torch.arange(QWEN_TOP_K + 1, dtype=torch.int32)
    token = torch.zeros(QWEN_TOP_K, dtype=torch.int32)

    def prepare(layer: int, experts: torch.Tensor) -> Callable[[], object]:
        host = store[layer]
        assert isinstance(host, PackedLayer)
        addresses = experts * host.image_bytes + host.buffers.data_ptr()
        return lambda: compute_experts(
            engine, host.layout, addresses, activation, hidden, begin, token, out
        )

    return prepare


def _executor_calls(store: HostStore, executor: CpuExecutor) -> PrepareCall:
    """Return a function that prepares a call as an experts module makes it."""
    hidden, weights = torch.randn(1, QWEN_HIDDEN), torch.full((1, QWEN_TOP_K), 0.125)

    def prepare(layer: int, experts: torch.Tensor) -> Callable[[], object]:
        index = experts[None]
        return lambda: executor.execute(layer, hidden, index, weights, FUNCTIONS)

    return prepare


def main() -> int:
    """Measure; print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--repetitions", type=int, default=400)
    parser.add_argument("--bookkeeping-only", action="store_true")
    parser.add_argument("--layers", type=int, default=6, help="of the part on the CPU alone")
    parser.add_argument("--cpu-only", action="store_true", help="all experts on the CPU alone")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, dict[str, float]] = {}
    for share in () if flags.cpu_only else (0.25, 0.5, 1.0):
        found = bookkeeping(flags.steps, share)
        report[f"bookkeeping at {share:.0%} resident, microseconds per layer"] = found
        found = on_the_emulated_device(flags.steps, share)
        report[f"emulated at {share:.0%} resident, microseconds per layer"] = found
    for name in () if flags.bookkeeping_only else ("int4", "int8"):
        found = through_executor(name, flags.threads, flags.repetitions, flags.layers)
        report[f"all on the CPU, {name}, microseconds per layer"] = found
    for title, values in report.items():
        print(title, ", ".join(f"{key} {value:.3g}" for key, value in values.items()))
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

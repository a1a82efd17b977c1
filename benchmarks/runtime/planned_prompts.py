"""The host's work in a planned prompt's layers: python -m benchmarks.runtime.planned_prompts

A prompt of 512 tokens runs through layers of which a GPU holds a quarter of 128 experts. The
executor, the planner, the copy engine and the tables of the launches are real; streams queue
nothing, kernels compute nothing and the router's choice is random, so what is left is Python and
its libraries. Microseconds a layer, medians: the whole, and parts that do not contain each other.
Launches of Triton's kernels and calls of the driver come on top of it. `--functions` prints where
the time goes.
"""

import argparse
import cProfile
import json
import pstats
import sys
import time
from statistics import median
from typing import Any

import torch
from benchmarks.runtime.overhead import FUNCTIONS, Parts, SilentKernels, make_store

from tandem.devices.cuda.copies import CudaCopyEngine, Link
from tandem.devices.cuda.device import CudaDevice
from tandem.devices.cuda.kernels import Prepared
from tandem.devices.cuda.streams import CudaStreams, Event, Stream, Work
from tandem.experts.cache.clock import WallClock
from tandem.experts.cache.expert_cache import ExpertCache, Machine
from tandem.experts.execution.batch import ExpertBatch
from tandem.experts.execution.expert_kernels import WeightSource
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.experts.tracing.cache_statistics import CacheStatistics
from tandem.kernels.dense import CpuThreads
from tandem.policy.cost import HardwareProfile, ShapeCosts
from tandem.policy.plan import Geometry
from tandem.policy.settings import PlannerSettings
from tandem.triton_kernels.rows import row_table

GEOMETRY = Geometry(48, 128, 8)
HIDDEN, INTERMEDIATE = 256, 768  # large enough for one driver call to pay
SETTINGS = PlannerSettings(prediction="regression", prefetch_count=2, copies_prompts=True)
# An H200 with 14 threads: an expert of Qwen3-30B-A3B by its number of tokens, and its copy.
TOKENS = (1, 16, 32, 64, 512)
CPU_SECONDS, GPU_SECONDS = (2.4e-5, 6e-5, 3e-4, 3e-4, 1e-3), (2e-6, 5e-6, 5e-6, 5e-6, 2e-5)
COPY_SECONDS, COPY_BYTES_PER_SECOND = 5.2e-5, 51e9


class SilentEvent:
    """An event of a stream that has nothing to do."""

    def query(self) -> bool:
        """Return True: everything is done."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


class SilentStreams(CudaStreams):
    """Streams in host memory: work on the model's stream runs at once, copies are not done."""

    name = "silent"
    device = torch.device("cpu")

    def __init__(self) -> None:
        """Have no GPU."""

    def run(self, stream: Stream, work: Work) -> None:
        """Do the work now."""
        work()

    def _copy_in_one_call(self, stream: Stream, entries: Any) -> bool:
        return True

    def record(self, stream: Stream, *, is_timed: bool = False) -> SilentEvent:
        """Return an event that is done."""
        return SilentEvent()

    def wait(self, stream: Stream, event: Event) -> None:
        """Wait for nothing."""

    def between(self, first: Event, last: Event) -> float:
        """Return no time."""
        return 0.0

    def synchronize(self) -> None:
        """Wait for nothing."""

    def limit(self, num_bytes: int | None) -> None:
        """Limit nothing."""

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    pinned = empty


class SilentGpu(CudaDevice):
    """A device to which no rows are copied."""

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Do nothing."""


class SilentGpuKernels:
    """Builds the tables of launches, and launches nothing."""

    grouped = None

    def prepare(self, batch: ExpertBatch, use: WeightSource) -> Prepared:
        """Return a batch's table as `TritonKernels` does."""
        table = row_table(use.addresses(), batch.begin, batch.token)
        return Prepared(table.memory, lambda memory: table.on(memory) and None)

    def add_rows(self, *tensors: torch.Tensor) -> None:
        """Add nothing."""


def main() -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.25, help="of the experts on the GPU")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--functions", action="store_true", help="print a profile")
    options = parser.parse_args()
    torch.set_num_threads(1)
    executor, parts = _executor(options.share), Parts()
    statistics = CacheStatistics()
    _prompts(executor, options.tokens, 3)
    executor.listeners.append(statistics)
    whole = _prompts(executor, options.tokens, options.prompts)
    if options.functions:
        profiler = cProfile.Profile()
        profiler.runcall(_prompts, executor, options.tokens, options.prompts)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    cache = executor.cache
    parts.time(cache.planner, "plan", "plan")
    parts.time(cache.planner, "learn", "learn")
    parts.time(executor.device, "launch", "a launch")
    parts.time(cache.engine, "submit", "a call for copies")
    _prompts(executor, options.tokens, options.prompts)
    found = {"a layer": median(whole) * 1e6, **parts.microseconds()}
    launches = parts.count("a launch") / parts.count("plan")
    found |= {"launches a layer": launches, "copies a layer": statistics.copies / statistics.calls}
    print(", ".join(f"{name} {value:.1f}" for name, value in found.items()))
    print(json.dumps(found))
    return 0


def _executor(share: float) -> HybridExecutor:
    """Return an executor with a full cache, of a GPU that does nothing."""
    costs = ShapeCosts(
        shape="planned", num_moe_layers=GEOMETRY.num_layers, num_experts=GEOMETRY.num_experts,
        top_k=GEOMETRY.top_k, expert_bytes=1 << 20, tokens=TOKENS, cpu_seconds=CPU_SECONDS,
        gpu_seconds=GPU_SECONDS, dense_seconds=(1e-4,) * len(TOKENS),
        cpu_first_expert_seconds=1e-5, link_seconds_per_expert=COPY_SECONDS,
    )  # fmt: skip
    profile = HardwareProfile(
        name="planned", source="made up", cpu="made up", gpu="none", cpu_threads=1,
        gpu_memory_bytes=1 << 40, host_memory_bytes=1 << 40,
        link_bytes_per_second=COPY_BYTES_PER_SECOND, cpu_slowdown_while_copying=1.03,
        link_slowdown_while_computing=1.0, shapes=(costs,),
    )  # fmt: skip
    streams, clock = SilentStreams(), WallClock()
    kernels = SilentKernels(CpuThreads(num_threads=1))
    device = SilentGpu(streams, SilentGpuKernels(), is_watched=lambda: False)  # type: ignore[arg-type]
    store = make_store(GEOMETRY, HIDDEN, INTERMEDIATE, "int4")

    def make_engine(store: Any, slots: Any, geometry: Any, _: Any) -> CudaCopyEngine:
        link = Link(COPY_BYTES_PER_SECOND)
        return CudaCopyEngine(store, slots, geometry, clock, streams, device.events, link)

    machine = Machine(profile, costs)
    cache = ExpertCache(store, device, clock, GEOMETRY, machine, SETTINGS, make_engine)
    cache.resize(round(share * GEOMETRY.num_layers * GEOMETRY.num_experts))
    return HybridExecutor(cache, device, kernels)


def _prompts(executor: HybridExecutor, tokens: int, count: int) -> list[float]:
    """Return the seconds of every layer of some prompts, with the learning of the layer before."""
    generator, seconds = torch.Generator().manual_seed(0), []
    hidden = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, generator=generator)
    weights = torch.full((tokens, GEOMETRY.top_k), 0.125, dtype=torch.bfloat16)
    for prompt in range(count):
        executor.begin_step([prompt] * tokens, is_prefill=True)
        with executor.deferring():
            for layer in range(GEOMETRY.num_layers):
                scores = torch.rand(tokens, GEOMETRY.num_experts, generator=generator)
                index = scores.topk(GEOMETRY.top_k).indices
                begin = time.perf_counter()
                executor.execute(layer, hidden, index, weights, FUNCTIONS)
                seconds.append(time.perf_counter() - begin)
    return seconds


if __name__ == "__main__":
    sys.exit(main())

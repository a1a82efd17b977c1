"""Measures the costs of a GPU and its link: the GPU's part of a `HardwareProfile`, in seconds.

GPU times are taken between events after a pause, so that they exclude the host's work; experts are
read from the GPU's memory, not from its L2 cache. Link times are the times of pinned copies, alone
and while the CPU computes. All are measured with the model's own experts, several at a time.

The host's work for a layer is measured separately, as `HostCosts`, because the GPU waits for it:

    routing, tables, launches and the sum -> a cost of each layer
    copying the CPU's rows to the GPU     -> a cost of a layer with experts on the CPU
    a launch for several fetched experts  -> shared equally among these experts

A step that is one graph has other costs (`hand_over_trial`).

The host's work per step is counted in the cost of the dense parts, which are timed in whole steps.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.devices.cuda.device import CudaDevice
from tandem.devices.cuda.streams import Stream
from tandem.experts.cache.copy_engine import copy_image
from tandem.experts.execution.batch import CallSide, ExpertBatch
from tandem.experts.execution.layer_call import LayerCall
from tandem.experts.execution.routing import Routing
from tandem.experts.measuring.profiler import (
    REPETITIONS,
    MeasuredExperts,
    experts_in_memory,
    seconds_each,
    while_repeating,
)
from tandem.kernels.formats.weight_format import aligned
from tandem.policy.cost import FETCHES_A_LAUNCH, SEGMENTS, HardwareProfile, HostCosts

# Between two uses of an expert, other experts of this many cache sizes are read, so that it is read
# from memory.
CACHES_BETWEEN_USES = 4


class _Held(NamedTuple):
    """Experts in device memory during a measurement, as a `WeightSource`."""

    memory: Sequence[Tensor]

    def images(self) -> Sequence[Tensor]:
        """Return the experts' memory."""
        return self.memory

    def addresses(self) -> Sequence[int]:
        """Return the addresses of the experts' memory."""
        return [memory.data_ptr() for memory in self.memory]


def measure_device(
    profile: HardwareProfile,
    device: CudaDevice,
    experts: MeasuredExperts,
    graph: Callable[[float], HostCosts] | None = None,
) -> HardwareProfile:
    """Return a profile with measured costs of the GPU, the link and the host's work.

    The CPU's costs are unchanged. In `profile` the dense parts must already be measured on the GPU,
    and `layer_seconds` of its host costs, if any, must be a layer's wait for the router's choice.
    The store should be pinned. `graph` gets the seconds of a fetched expert's launch, and returns
    the host costs of steps that are one graph; None: no step is one graph.
    """
    bench = _Bench(device, experts)
    (shape,) = profile.shapes
    link = bench.link_seconds()
    cpu_slowdown, link_slowdown = bench.slowdowns(link)
    shape = dataclasses.replace(
        shape, gpu_seconds=bench.gpu_table(shape.tokens), link_seconds_per_expert=link
    )
    known = profile.host_costs()
    wait_seconds = 0.0 if known is None else known.layer_seconds
    segments = HostCosts(
        path=SEGMENTS,
        step_seconds=0.0,
        layer_seconds=wait_seconds + bench.host_seconds(bench.hand_off),
        cpu_begin_seconds=0.0,  # the CPU begins before the launches
        cpu_end_seconds=bench.upload_seconds(),
        fetch_seconds=bench.launch_seconds() / FETCHES_A_LAUNCH,
    )
    host = () if graph is None else (graph(segments.fetch_seconds),)  # the default path comes first
    return dataclasses.replace(
        profile,
        source="measured by tandem profile",
        gpu=device.streams.name,
        gpu_memory_bytes=device.memory().total_bytes,
        link_bytes_per_second=shape.expert_bytes / link,
        cpu_slowdown_while_copying=cpu_slowdown,
        link_slowdown_while_computing=link_slowdown,
        shapes=(shape,),
        host=(*host, segments),
    )


class _Bench:
    """Times batches of the first layer's experts, and copies of experts of all layers."""

    def __init__(self, device: CudaDevice, experts: MeasuredExperts) -> None:
        store, geometry = experts.store, experts.geometry
        self._device, self._experts, self._store = device, experts, store
        self._several, self._top_k = experts.num_at_once, geometry.top_k
        slot_bytes = aligned(max(layer.image_bytes for layer in store))
        count = _count_held(self._several, slot_bytes, device)
        self._held = device.allocate(count * slot_bytes).view(count, slot_bytes).unbind()
        self._turns = itertools.cycle(self._held)
        self._token = experts.hidden(1, device.streams.device)
        known = experts_in_memory(store)
        self._first = known[0]  # experts of the first layer
        pairs = [
            (place, layer, e) for layer, some in enumerate(known) for place, e in enumerate(some)
        ]
        self._copies = itertools.cycle([(layer, expert) for _, layer, expert in sorted(pairs)])
        for place, image in enumerate(self._held):
            copy_image(store, 0, self._first[place % len(self._first)], image)

    def gpu_table(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Return the seconds that one more expert adds to a batch, for each number of `tokens`."""
        seconds: list[float] = []
        for count in tokens:
            one, many = self._batch_seconds(1, count), self._batch_seconds(self._several, count)
            least = seconds[-1] if seconds else 0.0
            seconds.append(seconds_each(one, many, self._several, least))
        return tuple(seconds)

    def link_seconds(self) -> float:
        """Return the seconds of copying one expert into device memory."""
        self._copy_seconds()
        return median(self._copy_seconds() for _ in range(REPETITIONS))

    def slowdowns(self, link: float) -> tuple[float, float]:
        """Return how many times longer CPU work takes during copies, and copies during CPU work.

        Both factors are 1 or more. `link` is the result of `link_seconds`.
        """
        batch = self._batch(self._several, 1, torch.device("cpu"))
        alone = median(self._cpu_seconds(batch) for _ in range(REPETITIONS))
        computed = list[float]()
        copies = while_repeating(
            lambda: computed.append(self._cpu_seconds(batch)),
            lambda: median(self._copy_seconds() for _ in range(4 * REPETITIONS)),
        )
        return max(1.0, median(computed or [alone]) / alone), max(1.0, copies / link)

    def _batch(self, num_experts: int, num_tokens: int, where: torch.device) -> ExpertBatch:
        """Return a batch of the first layer's experts on `where`; every expert has every token."""
        host, chosen = self._store[0], self._first[:num_experts]
        index = torch.tensor([list(chosen)] * num_tokens, device="cpu")
        routing = Routing(index, host.arrivals.num_experts)
        call = LayerCall(host, self._experts.functions, routing, chosen)
        hidden = self._experts.hidden(num_tokens, where)
        rows = torch.empty(num_tokens * num_experts, self._experts.hidden_size, device=where)
        return call.batch(0, num_experts, CallSide(hidden, rows))

    def _batch_seconds(self, num_experts: int, num_tokens: int) -> float:
        streams = self._device.streams
        batch = self._batch(num_experts, num_tokens, streams.device)

        def once() -> float:
            launch = self._device.prepared(batch, self._next(num_experts))
            seconds = streams.seconds(Stream.COMPUTE, launch)
            self._device.download()  # waits until the launch's table is no longer read
            return seconds

        once()  # compiles the kernels
        return median(once() for _ in range(REPETITIONS))

    def _next(self, num_experts: int) -> _Held:
        return _Held([next(self._turns) for _ in range(num_experts)])

    def host_seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds that the host takes for `work`; waits for the GPU after each run."""

        def once() -> float:
            begin = time.perf_counter()
            work()
            seconds = time.perf_counter() - begin
            self._device.download()  # waits for the launch
            return seconds

        once()
        return median(once() for _ in range(REPETITIONS))

    def hand_off(self) -> Tensor:
        """Queue a layer's work after the router's choice, for one token; return its result."""
        streams, count = self._device.streams, min(self._several, self._top_k)
        index = torch.arange(count, device="cpu")[None]
        routing = Routing(index, self._store[0].arrivals.num_experts)
        call = LayerCall(self._store[0], self._experts.functions, routing, range(count))
        side = CallSide(self._token, self._device.rows(count, self._experts.hidden_size))
        batch = call.batch(0, count, side)
        streams.run(Stream.COMPUTE, self._device.prepared(batch, self._next(count)))
        weights = self._token.new_ones(1, count)
        return call.prepare_result(side, weights, self._device.prepare_sum)()

    def launch_seconds(self) -> float:
        """Return how long the host takes to queue a batch of one expert."""
        batch = self._batch(1, 1, self._device.streams.device)

        def launch() -> None:
            work = self._device.prepared(batch, self._next(1))
            self._device.streams.run(Stream.COMPUTE, work)

        return self.host_seconds(launch)

    def upload_seconds(self) -> float:
        """Return the seconds of copying the CPU's results of one token and layer to the GPU."""
        count = self._top_k
        host = self._device.host_rows(count, self._experts.hidden_size)
        there = self._device.rows(count, self._experts.hidden_size)

        def upload() -> None:
            self._device.upload(host, there)
            self._device.streams.synchronize()

        return self.host_seconds(upload)

    def _copy_seconds(self) -> float:
        def copy() -> None:
            for image in self._held[: self._several]:
                copy_image(self._store, *next(self._copies), image)

        return self._device.streams.seconds(Stream.FETCH, copy) / self._several

    def _cpu_seconds(self, batch: ExpertBatch) -> float:
        begin = time.perf_counter()
        self._experts.kernels.run(batch)
        return time.perf_counter() - begin


def _count_held(several: int, slot_bytes: int, device: CudaDevice) -> int:
    """Return how many experts to hold on the device and use in turn: at least `several`.

    More are held so that each has left the L2 cache before its next use, unless all of them would
    fill more than half of the free memory.
    """
    num_more = math.ceil(CACHES_BETWEEN_USES * device.streams.cache_bytes() / slot_bytes)
    return max(several, min(several + num_more, device.memory().free_bytes // 2 // slot_bytes))

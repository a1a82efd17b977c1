"""Measures what a GPU and its link cost: the GPU's part of a `HardwareProfile`, in seconds.

GPU times are those of the GPU alone (events behind a pause), link times those of pinned copies,
alone and while the CPU computes; all of the model's own experts, several at a time.
"""

import dataclasses
import itertools
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.offload.batch import CallSide, ExpertBatch, ExpertFunctions
from tandem.offload.copy_engine import copy_image
from tandem.offload.cuda import CudaDevice
from tandem.offload.cuda_streams import Lane
from tandem.offload.expert_kernels import ExpertKernels
from tandem.offload.host_store import HostStore
from tandem.offload.image import aligned
from tandem.offload.layer_call import LayerCall
from tandem.offload.profiler import EXPERTS_AT_ONCE, REPETITIONS, beside, seconds_each
from tandem.offload.routing import Routing
from tandem.policy.cost import HardwareProfile
from tandem.policy.plan import Geometry


class _Held(NamedTuple):
    """Experts that lie in device memory, for the length of a measurement."""

    memory: Sequence[Tensor]

    def images(self) -> Sequence[Tensor]:
        """Return the experts' memory."""
        return self.memory

    def addresses(self) -> Sequence[int]:
        """Return where it is."""
        return [memory.data_ptr() for memory in self.memory]


def measure_device(
    profile: HardwareProfile,
    device: CudaDevice,
    store: HostStore,
    geometry: Geometry,
    functions: ExpertFunctions,
    kernels: ExpertKernels,
    *,
    dtype: torch.dtype,
    hidden_size: int,
) -> HardwareProfile:
    """Return a profile with the GPU and the link as they are; the CPU's times stay.

    The store should be pinned; `kernels` are the CPU's.
    """
    bench = _Bench(device, store, geometry, functions, kernels, dtype, hidden_size)
    (shape,) = profile.shapes
    link = bench.link_seconds()
    cpu_slowdown, link_slowdown = bench.slowdowns(link)
    shape = dataclasses.replace(
        shape, gpu_seconds=bench.gpu_table(shape.tokens), link_seconds_per_expert=link
    )
    return dataclasses.replace(
        profile,
        source="measured by tandem profile",
        gpu=device.streams.name,
        gpu_memory_bytes=device.memory().total_bytes,
        link_bytes_per_second=shape.expert_bytes / link,
        cpu_slowdown_while_copying=cpu_slowdown,
        link_slowdown_while_computing=link_slowdown,
        shapes=(shape,),
    )


class _Bench:
    """Runs batches and copies of one layer's experts."""

    def __init__(
        self,
        device: CudaDevice,
        store: HostStore,
        geometry: Geometry,
        functions: ExpertFunctions,
        kernels: ExpertKernels,
        dtype: torch.dtype,
        hidden_size: int,
    ) -> None:
        self._device, self._store, self._functions = device, store, functions
        self._kernels, self._dtype, self._hidden_size = kernels, dtype, hidden_size
        self._several = min(EXPERTS_AT_ONCE, geometry.num_experts)
        slot_bytes = aligned(max(layer.image_bytes for layer in store))
        memory = device.allocate(self._several * slot_bytes).view(self._several, slot_bytes)
        self._held = _Held(memory.unbind())
        self._copies = itertools.cycle(
            [
                (layer, expert)
                for expert in range(geometry.num_experts)
                for layer in range(len(store))
            ]
        )
        for expert, image in enumerate(self._held.memory):
            copy_image(store, 0, expert, image)

    def gpu_table(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Return the seconds of one more expert, by token count."""
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
        """Return how much CPU and link slow each other down: factors of at least 1."""
        batch = self._batch(self._several, 1, torch.device("cpu"))
        alone = median(self._cpu_seconds(batch) for _ in range(REPETITIONS))
        computed = list[float]()
        copies = beside(
            lambda: computed.append(self._cpu_seconds(batch)),
            lambda: median(self._copy_seconds() for _ in range(4 * REPETITIONS)),
        )
        return max(1.0, median(computed or [alone]) / alone), max(1.0, copies / link)

    def _batch(self, num_experts: int, num_tokens: int, where: torch.device) -> ExpertBatch:
        """Return a batch in which every expert has every token."""
        host = self._store[0]
        index = torch.arange(num_experts).expand(num_tokens, num_experts).contiguous()
        call = LayerCall(
            host, self._functions, Routing(index, host.arrivals.num_experts), range(num_experts)
        )
        hidden = torch.randn(num_tokens, self._hidden_size, device=where).to(self._dtype)
        rows = torch.empty(num_tokens * num_experts, self._hidden_size, device=where)
        return call.batch(0, num_experts, CallSide(hidden, rows))

    def _batch_seconds(self, num_experts: int, num_tokens: int) -> float:
        streams = self._device.streams
        batch = self._batch(num_experts, num_tokens, streams.device)
        launch = self._device.prepared(batch, _Held(self._held.memory[:num_experts]))
        streams.seconds(Lane.COMPUTE, launch)  # compiles
        return median(streams.seconds(Lane.COMPUTE, launch) for _ in range(REPETITIONS))

    def _copy_seconds(self) -> float:
        def copy() -> None:
            for image in self._held.memory:
                copy_image(self._store, *next(self._copies), image)

        return self._device.streams.seconds(Lane.FETCH, copy) / self._several

    def _cpu_seconds(self, batch: ExpertBatch) -> float:
        begin = time.perf_counter()
        self._kernels.run(batch)
        return time.perf_counter() - begin

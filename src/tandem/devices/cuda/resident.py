"""Computes layers whose experts are all on the GPU, without a plan and without waiting.

In a step of few tokens, kernels look up the address of each routed token's expert and compute each
routed token alone; an expert that several tokens share is then read from the GPU's L2 cache. Larger
steps sort routed tokens by expert on the device. All of this can be captured. Addresses stay valid
while the expert cache keeps its size: where every expert has a slot, none is ever evicted.
"""

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.devices.cuda.streams import CudaStreams, Event, Stream
from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.execution.batch import ExpertFunctions
from tandem.experts.execution.routing import Routing
from tandem.experts.store.host_store import HostLayer
from tandem.experts.store.packed_layer import PackedLayer
from tandem.experts.tracing.events import LayerExecuted
from tandem.policy.plan import LayerPlan
from tandem.triton_kernels.rows import GroupedRows

if TYPE_CHECKING:
    from tandem.triton_kernels.experts import TritonExperts

MAX_TOKENS = 8  # for more tokens, sorting by expert pays


class ResidentLayers:
    """Computes the layers of a cache that has a slot for every expert."""

    def __init__(self, cache: ExpertCache, experts: "TritonExperts", streams: CudaStreams) -> None:
        """Take the cache, the kernels `experts`, and the streams of the device with the slots."""
        self._cache, self._experts, self._streams = cache, experts, streams
        self._device = streams.device
        self._noted = deque[tuple[int, Tensor, Event]]()  # (layer, choice, event after its copy)
        self._tables: dict[int, Tensor] = {}
        self._is_packed = all(
            isinstance(host, PackedLayer) and host.input_order is None for host in cache.store
        )

    def is_whole(self) -> bool:
        """Tell whether the experts of all layers are packed and resident: no plan is needed.

        The condition covers all layers, because a plan for one could evict experts of any other.
        """
        return self._is_packed and self._cache.planner.residency.has_every_expert()

    def serves(self, functions: ExpertFunctions) -> bool:
        """Tell whether a layer with these `functions` can be computed without a plan.

        `is_whole` must be true, and the layer must have a native activation and no norm after it.
        """
        return functions.native is not None and functions.post_norm is None and self.is_whole()

    def execute(
        self,
        layer: int,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        functions: ExpertFunctions,
    ) -> Tensor:
        """Queue a layer; return its result, as `Executor.execute` does."""
        from tandem.triton_kernels import sorting

        host = self._cache.store[layer]
        assert isinstance(host, PackedLayer)
        num_tokens, top_k = top_k_index.shape
        table = self._table(layer)
        if num_tokens > MAX_TOKENS:
            rows, row_of = sorting.sorted_by_expert(top_k_index, table)
        else:
            addresses, row_of = sorting.each_alone(top_k_index, table)
            rows = each_row_alone(addresses, num_tokens, top_k)
        computed = hidden.new_empty(num_tokens * top_k, hidden.shape[1], dtype=torch.float32)
        self._experts.compute(host.layout, functions.native, hidden.contiguous(), rows, computed)
        out = torch.empty_like(hidden)
        self._experts.add_rows(computed, row_of, top_k_weights.contiguous(), out)
        return out

    def note(self, layer: int, top_k_index: Tensor) -> None:
        """Queue the copy of a router's choice to the host, from which `noted` makes an event."""
        streams = self._streams
        with torch.inference_mode(False):
            memory = streams.pinned(top_k_index.nbytes)
            host = memory.view(top_k_index.dtype).view(top_k_index.shape)

        def copy() -> None:
            host.copy_(top_k_index, non_blocking=True)

        streams.run(Stream.COMPUTE, copy)
        self._noted.append((layer, host, streams.record(Stream.COMPUTE)))

    def noted(self, now: float) -> Iterator[LayerExecuted]:
        """Yield an event for each layer that `note` has been called for since the last call.

        Waits for the copies of the routers' choices. `now` is the begin and end of each event.
        """
        while self._noted:
            layer, chosen, come = self._noted.popleft()
            come.synchronize()
            yield resident_event(self._cache.store[layer], chosen, now)

    def prepare(self, num_tokens: int) -> None:
        """Build the tables that must exist before a step of `num_tokens` tokens is captured."""
        _row_tables(num_tokens, self._cache.geometry.top_k, self._device)
        if self.is_whole():
            for layer in range(len(self._cache.store)):
                self._table(layer)

    def _table(self, layer: int) -> Tensor:
        """Return the addresses of a layer's experts: (num_experts,) int64, on the device."""
        if layer not in self._tables:
            cache, first = self._cache, layer * self._cache.geometry.num_experts
            slot_of, slots = cache.planner.residency.slot_of, cache.engine.slots
            addresses = [
                slots.memory(slot_of[first + expert]).data_ptr()
                for expert in range(cache.store[layer].arrivals.num_experts)
            ]
            self._tables[layer] = torch.tensor(addresses, device=self._device)
        return self._tables[layer]


def resident_event(host: HostLayer, chosen: Tensor, now: float) -> LayerExecuted:
    """Return the event of a layer whose experts are all resident.

    `chosen` is the router's choice, on the host; `now` is the layer's begin and end.
    """
    routing = Routing(chosen, host.arrivals.num_experts)
    experts = routing.experts
    plan = LayerPlan(host.layer, experts, (), (), (), (), (), 0.0, 0.0, len(experts))
    return LayerExecuted(
        layer=host.layer,
        num_tokens=routing.num_tokens,
        num_active_experts=len(routing.experts),
        num_expert_rows=routing.num_routed,
        touched_bytes=len(routing.experts) * host.image_bytes,
        load=routing.load(host.layer, None),
        plan=plan,
        begin_seconds=now,
        end_seconds=now,
    )


def each_row_alone(addresses: Tensor, num_tokens: int, top_k: int) -> GroupedRows:
    """Return groups for the kernels: every routed token is a group of its own.

    `addresses` has the address of each routed token's expert.
    """
    every, token = _row_tables(num_tokens, top_k, addresses.device)
    none = every[:0]
    return GroupedRows(addresses, every, token, none, none, most_tokens=1, block_rows=0)


@lru_cache(maxsize=64)
def _row_tables(num_tokens: int, top_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return 0 to num_tokens * top_k inclusive, and the token of each routed token, as int32."""
    with torch.inference_mode(False):
        every = torch.arange(num_tokens * top_k + 1, dtype=torch.int32, device=device)
        return every, torch.div(every[:-1], top_k, rounding_mode="floor")

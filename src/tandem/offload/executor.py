"""Computes a MoE layer's experts. This one, `CpuExecutor`, runs every expert on the CPU.

It is the simplest implementation of the seam and the baseline of all others. The result does not
depend on who computed what: each (token, expert) gives one fp32 row, and rows are added in the
order of the router's top-k.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tandem.offload.batch import CallSide, ExpertFunctions
from tandem.offload.events import LayerExecuted, Listener
from tandem.offload.expert_kernels import ExpertKernels
from tandem.offload.host_store import HostLayer, HostStore
from tandem.offload.layer_call import LayerCall
from tandem.offload.routing import Routing
from tandem.offload.row_memory import RowMemory

# Bounds the fp32 rows of a long prompt: 2048 tokens x top-8 x 2048 values are 128 MiB.
MAX_TOKENS_AT_ONCE = 2048


class Executor(Protocol):
    """The seam between a model's experts modules and whatever computes them."""

    store: HostStore
    listeners: list[Listener]

    def begin_step(self, token_ids: Sequence[int], *, is_prefill: bool) -> None:
        """Announce the tokens of the forward pass that comes; ids are empty if unknown."""

    def execute(
        self,
        layer: int,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        functions: ExpertFunctions,
    ) -> Tensor:
        """Compute the sum over k of weight * expert(hidden), in the shape and dtype of `hidden`.

        `hidden` is (n_tokens, hidden_size), `top_k_index` and `top_k_weights` (n_tokens, top_k).
        An id outside 0..num_experts-1 is a padding of the router and adds nothing.
        """

    def close(self) -> None:
        """End all threads; the executor is not used afterwards."""


class CpuExecutor:
    """Runs every active expert on the CPU: packed ones natively, plain ones in torch."""

    def __init__(self, store: HostStore, *, num_threads: int | None = None, isa: str = "") -> None:
        """Serve the layers of a store; threads start with the first packed layer."""
        self.store = store
        self.listeners: list[Listener] = []
        self._kernels = ExpertKernels(num_threads=num_threads, isa=isa)
        self._rows = RowMemory()

    def begin_step(self, token_ids: Sequence[int], *, is_prefill: bool) -> None:
        """Need nothing."""

    def close(self) -> None:
        """Need nothing: the kernels' threads end with the object."""

    def execute(
        self,
        layer: int,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        functions: ExpertFunctions,
    ) -> Tensor:
        """Compute a layer; see `Executor`."""
        self._kernels.wake()
        device = hidden.device
        rows = hidden.detach().to("cpu")
        index, weights = top_k_index.to("cpu"), top_k_weights.detach().to("cpu")
        if len(rows) <= MAX_TOKENS_AT_ONCE:
            out = self._execute_chunk(self.store[layer], rows, index, weights, functions)
            return out.to(device)
        chunks = [
            self._execute_chunk(self.store[layer], r, i, w, functions)
            for r, i, w in zip(
                rows.split(MAX_TOKENS_AT_ONCE),
                index.split(MAX_TOKENS_AT_ONCE),
                weights.split(MAX_TOKENS_AT_ONCE),
                strict=True,
            )
        ]
        return torch.cat(chunks).to(device)

    def _execute_chunk(
        self,
        layer: HostLayer,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        functions: ExpertFunctions,
    ) -> Tensor:
        routed = self._kernels.run_routed(layer, functions, hidden, top_k_index, top_k_weights)
        if routed is not None:
            out, num_active = routed
            if self.listeners:
                self._report(layer, top_k_index, num_active, top_k_index.numel())
            return out
        routing = Routing(top_k_index, layer.arrivals.num_experts)
        order = routing.lone_order()
        side = CallSide(hidden, self._rows.rows(routing.num_rows, hidden.shape[1]))
        call = LayerCall(layer, functions, routing, order)
        if order:
            self._kernels.run(call.batch(0, len(order), side))
        if self.listeners:
            self._report(layer, top_k_index, len(routing.experts), routing.num_rows)
        return call.result(side, top_k_weights, self._kernels.add_rows)

    def _report(self, layer: HostLayer, chosen: Tensor, num_active: int, num_rows: int) -> None:
        event = LayerExecuted(
            layer=layer.layer,
            num_tokens=len(chosen),
            num_active_experts=num_active,
            num_expert_rows=num_rows,
            touched_bytes=num_active * (layer.num_bytes // layer.arrivals.num_experts),
            chosen=chosen,
        )
        for listener in self.listeners:
            listener(event)

"""Queues the layers of a captured step. The host computes their misses; queueing never waits.

    publish -> doorbell -> hits (vector kernels) -> wait for `done` -> combine

Where the host may fetch misses, the vector kernels are launched a second time for the fetched
experts, between the wait and combine.

`HandedLayers` takes the place of `ResidentLayers`, so that the whole step is one graph. It shares
the mailbox and the table of addresses with the coordinator (docs/decisions/0016-coordinator.md),
which is the host's side.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.devices.cuda import handing
from tandem.devices.cuda.resident import each_row_alone
from tandem.devices.cuda.signals import KernelSignals, Signals
from tandem.experts.execution.batch import ExpertFunctions
from tandem.experts.execution.look_ahead_routers import LookAheadRouter
from tandem.experts.store.host_store import HostStore
from tandem.experts.store.packed_layer import PackedLayer
from tandem.kernels import _native
from tandem.policy.step_path import MAX_GRAPH_TOKENS
from tandem.triton_kernels.experts import TritonExperts


class HandedLayers:
    """Queues the layers of captured steps of one size; a call queues the kernels of one layer."""

    def __init__(
        self,
        store: HostStore,
        box: "_native.MailboxLayout",
        memory: Tensor,
        table: Tensor,
        experts: TritonExperts,
        signals: Signals,
        words: handing.WaitWords,
        *,
        fetches: bool = False,
        routers: Sequence[LookAheadRouter | None] = (),
    ) -> None:
        """Take a mailbox of the layout `box` in `memory` (num_bytes,) uint8, which must be mapped.

        `table` (layers, experts) int64 on the device has the address of each resident expert, 0 for
        all other experts. All mailboxes share `words`, because only one step is under way at a
        time. `fetches` tells whether the host may answer with addresses of fetched experts.
        `routers` has, for each layer but the first, the router to run ahead; None if it cannot be
        run ahead.
        """
        self._store, self._box, self._memory, self._table = store, box, memory, table
        self._experts, self._signals = experts, signals
        self._words, self._fetches = words, fetches
        self._routers = routers
        self._router_inputs: dict[int, Tensor] = {}  # layer -> what its router has read

    def serves(self, layer: int, functions: ExpertFunctions, index: Tensor) -> bool:
        """Tell whether a layer can be handed over.

        Its weights must be packed with inputs in their original order. It must have a native
        activation, no norm after it, and at most `MAX_GRAPH_TOKENS` tokens.
        """
        host = self._store[layer]
        is_plain = functions.native is not None and functions.post_norm is None
        is_packed = isinstance(host, PackedLayer) and host.input_order is None
        return is_plain and is_packed and len(index) <= MAX_GRAPH_TOKENS

    def take_router_input(self, layer: int, hidden: Tensor) -> None:
        """Keep the input of a layer's router, (n_tokens, hidden_size), until the layer is queued.

        The next layer's router is run ahead on this input.
        """
        if layer < len(self._routers) and self._routers[layer] is not None:
            self._router_inputs[layer] = hidden.contiguous()

    def __call__(
        self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor, functions: ExpertFunctions
    ) -> Tensor | None:
        """Queue a layer and return its result; None if it cannot be handed over."""
        if not self.serves(layer, functions, index):
            return None
        host = self._store[layer]
        assert isinstance(host, PackedLayer)
        if layer == 0:
            self._words.begin_step()
        hidden, index = hidden.contiguous(), index.contiguous()

        def hits(addresses: Tensor, computed: Tensor) -> None:
            rows = each_row_alone(addresses, *index.shape)
            self._experts.compute(host.layout, functions.native, hidden, rows, computed)

        return handing.hand_over_layer(
            self._tensors(layer, hidden, index.numel()), self._signals,
            self._table[layer, : host.arrivals.num_experts], hidden, index,
            weights.float().contiguous(), hits, layer=layer, fetches=self._fetches,
            next_router=self._next_router(layer),
        )  # fmt: skip

    def _next_router(self, layer: int) -> handing.NextRouter | None:
        """Return the next layer's router and its input; None if the router is not run ahead."""
        router_input = self._router_inputs.pop(layer, None)
        router = None if router_input is None else self._routers[layer]
        return (
            None
            if router_input is None or router is None
            else handing.NextRouter(router, router_input)
        )

    def launch_once(self, hidden: Tensor, top_k: int) -> None:
        """Queue a layer's kernels once, except the experts', for tokens that have chosen no expert.

        Nothing waits, because no expert is missing.
        """
        with torch.inference_mode(False):
            index = torch.full((len(hidden), top_k), -1, device=hidden.device)
            weights = torch.zeros(len(hidden), top_k, device=hidden.device)
        routers = [router for router in self._routers if router is not None]
        handing.hand_over_layer(
            self._tensors(0, hidden, index.numel()), KernelSignals(self._signals.wait_seconds),
            self._table[0, : self._store[0].arrivals.num_experts], hidden, index, weights,
            lambda addresses, rows: None, layer=0, fetches=self._fetches,
            next_router=handing.NextRouter(routers[0], hidden) if routers else None,
        )  # fmt: skip

    def _tensors(self, layer: int, hidden: Tensor, pairs: int) -> handing.MailboxTensors:
        """Return a layer's part of the mailbox as host tensors, for `pairs` routed tokens."""
        box, start = self._box, layer * self._box.layer_bytes

        def part(offset: int, count: int, dtype: torch.dtype) -> Tensor:
            return self._memory[offset : offset + count * dtype.itemsize].view(dtype)

        return handing.MailboxTensors(
            part(start + box.doorbell, 1, torch.int32),
            part(start + box.done, 1, torch.int32),
            part(start + box.choice, pairs, torch.int32),
            part(start + box.is_hit, pairs, torch.int32),
            part(start + box.weights, pairs, torch.float32),
            part(start + box.fetched, pairs, torch.int64),
            part(start + box.guessed, 1, torch.int32),
            part(start + box.guess, pairs, torch.int32),
            part(box.hidden, hidden.numel(), hidden.dtype),
            part(box.results, pairs * hidden.shape[1], torch.float32),
            self._words,
        )

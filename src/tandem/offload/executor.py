"""Computes a MoE layer's experts. This one, `CpuExecutor`, runs every expert on the CPU.

It is the simplest implementation of the seam and the baseline of all others. The result does not
depend on who computed what: each (token, expert) gives one fp32 row, and rows are added in the
order of the router's top-k.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels.cpu import detect_cpu
from tandem.kernels.native import NativeActivation, NativeExperts, is_supported
from tandem.kernels.reference import expert_ffn
from tandem.offload.events import LayerExecuted, Listener
from tandem.offload.host_store import HostLayer, HostStore
from tandem.offload.packed_layer import PackedLayer

# Bounds the fp32 rows of a long prompt: 2048 tokens x top-8 x 2048 values are 128 MiB.
MAX_TOKENS_AT_ONCE = 2048


@dataclass(frozen=True, slots=True)
class ExpertFunctions:
    """What surrounds the two matrix products of an expert: the model's own code.

    `native` is the same activation in the kernels' form, where they have it; `unpacked_activate`
    takes [gate; up] whatever order the model's own experts have.
    """

    activate: Callable[[Tensor], Tensor]
    post_norm: Callable[[Tensor], Tensor] | None = None
    native: NativeActivation | None = None
    unpacked_activate: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """The (token, expert) pairs of a call, expert by expert; on the CPU.

    Expert `experts[i]` has rows `begin[i]`..`begin[i + 1]` - 1; row j is of token `token[j]` and
    belongs at place `place[j]` of the flattened (n_tokens, top_k), or at j if `place` is None.
    """

    experts: Tensor
    begin: Tensor
    token: Tensor
    place: Tensor | None


@functools.lru_cache(maxsize=64)
def _rows_of_one_token(top_k: int) -> tuple[Tensor, Tensor]:
    return torch.arange(top_k + 1, dtype=torch.int32), torch.zeros(top_k, dtype=torch.int32)


def sort_rows(top_k_index: Tensor, num_experts: int) -> Rows:
    """Group the pairs of a (n_tokens, top_k) choice by expert; ids out of range are left out."""
    flat = top_k_index.flatten()
    if len(top_k_index) == 1 and all(0 <= expert < num_experts for expert in flat.tolist()):
        return Rows(flat, *_rows_of_one_token(len(flat)), place=None)  # saves 80 us a layer
    place = torch.argsort(flat, stable=True)
    chosen = flat[place]
    if flat.numel() and (chosen[0] < 0 or chosen[-1] >= num_experts):
        is_valid = (chosen >= 0) & (chosen < num_experts)
        place, chosen = place[is_valid], chosen[is_valid]
    experts, counts = torch.unique_consecutive(chosen, return_counts=True)
    begin = torch.zeros(len(experts) + 1, dtype=torch.int32)
    begin[1:] = counts.cumsum(0)
    token = torch.div(place, top_k_index.shape[1], rounding_mode="floor").int()
    return Rows(experts, begin, token, place)


class CpuExecutor:
    """Runs every active expert on the CPU: packed ones natively, plain ones in torch."""

    def __init__(self, store: HostStore, *, num_threads: int | None = None, isa: str = "") -> None:
        """Serve the layers of a store; threads start with the first packed layer."""
        self.store = store
        self.listeners: list[Listener] = []
        self.set_threads(num_threads, isa)

    def set_threads(self, num_threads: int | None, isa: str = "") -> None:
        """Choose how packed experts are computed; None takes all physical cores."""
        self._num_threads = num_threads or detect_cpu().physical_cores
        self._isa = isa
        self._native: NativeExperts | None = None

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
        num_tokens, top_k = top_k_index.shape
        rows = sort_rows(top_k_index, layer.arrivals.num_experts)
        if isinstance(layer, PackedLayer):
            computed = self._compute_packed(layer, hidden, rows, functions)
        else:
            computed = _compute_reference(layer, hidden, rows, functions.activate)
        if functions.post_norm is not None:
            computed = functions.post_norm(computed.to(hidden.dtype)).float()
        width = hidden.shape[1]
        expert_rows = computed
        if rows.place is not None:
            expert_rows = hidden.new_zeros((num_tokens * top_k, width), dtype=torch.float32)
            expert_rows[rows.place] = computed
        self._report(layer, num_tokens, rows)
        expert_rows = expert_rows.view(num_tokens, top_k, width)
        return add_in_top_k_order(expert_rows, top_k_weights).to(hidden.dtype)

    def _compute_packed(
        self, layer: PackedLayer, hidden: Tensor, rows: Rows, functions: ExpertFunctions
    ) -> Tensor:
        if functions.native is None or not is_supported(layer.layout):
            activate = functions.unpacked_activate or functions.activate
            return _compute_reference(layer, hidden, rows, activate)
        if self._native is None:
            self._native = NativeExperts(num_threads=self._num_threads, isa=self._isa)
        return self._native.compute(
            layer.layout,
            layer.buffers,
            functions.native,
            hidden.float(),
            rows.experts,
            rows.begin,
            rows.token,
        )

    def _report(self, layer: HostLayer, num_tokens: int, rows: Rows) -> None:
        num_active = len(rows.experts)
        event = LayerExecuted(
            layer=layer.layer,
            num_tokens=num_tokens,
            num_active_experts=num_active,
            num_expert_rows=len(rows.token),
            touched_bytes=num_active * (layer.num_bytes // layer.arrivals.num_experts),
        )
        for listener in self.listeners:
            listener(event)


def _compute_reference(
    layer: HostLayer, hidden: Tensor, rows: Rows, activate: Callable[[Tensor], Tensor]
) -> Tensor:
    """Compute row by row of experts in torch: (num_rows, hidden_size) fp32."""
    computed = hidden.new_empty((len(rows.token), hidden.shape[1]), dtype=torch.float32)
    begin = rows.begin.tolist()
    for i, expert in enumerate(rows.experts.tolist()):
        chosen = slice(begin[i], begin[i + 1])
        computed[chosen] = expert_ffn(hidden[rows.token[chosen]], layer.weights(expert), activate)
    return computed


def add_in_top_k_order(expert_rows: Tensor, top_k_weights: Tensor) -> Tensor:
    """Sum weight * row over k: (n_tokens, top_k, hidden_size) -> (n_tokens, hidden_size).

    A fixed order of fp32 additions, first to last: the same bits whoever computed the rows.
    """
    weights = top_k_weights.float()
    total = expert_rows[:, 0] * weights[:, 0, None]
    for k in range(1, expert_rows.shape[1]):
        total += expert_rows[:, k] * weights[:, k, None]
    return total

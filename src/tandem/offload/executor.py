"""Computes a MoE layer's experts. This one, `CpuExecutor`, runs every expert on the CPU.

It is the simplest implementation of the seam and the baseline of all others. The result does not
depend on who computed what: each (token, expert) gives one fp32 row, and rows are added in the
order of the router's top-k.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels.reference import expert_ffn
from tandem.offload.events import LayerExecuted, Listener
from tandem.offload.host_store import HostLayer, HostStore

# Bounds the fp32 rows of a long prompt: 2048 tokens x top-8 x 2048 values are 128 MiB.
MAX_TOKENS_AT_ONCE = 2048


@dataclass(frozen=True, slots=True)
class ExpertFunctions:
    """What surrounds the two matrix products of an expert; the model's own code."""

    activate: Callable[[Tensor], Tensor]
    post_norm: Callable[[Tensor], Tensor] | None = None


class CpuExecutor:
    """Runs every active expert on the CPU, one after the other, from the host store."""

    def __init__(self, store: HostStore) -> None:
        """Serve the layers of a store."""
        self.store = store
        self.listeners: list[Listener] = []

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
        expert_rows = hidden.new_zeros((num_tokens, top_k, hidden.shape[1]), dtype=torch.float32)
        active = [e for e in top_k_index.unique().tolist() if 0 <= e < layer.num_experts]
        num_rows = 0
        for expert in active:
            token_idx, k_idx = torch.where(top_k_index == expert)
            out = expert_ffn(hidden[token_idx], layer.weights(expert), functions.activate)
            if functions.post_norm is not None:
                out = functions.post_norm(out)
            expert_rows[token_idx, k_idx] = out.float()
            num_rows += len(token_idx)
        self._report(layer, num_tokens, len(active), num_rows)
        return add_in_top_k_order(expert_rows, top_k_weights).to(hidden.dtype)

    def _report(self, layer: HostLayer, num_tokens: int, num_active: int, num_rows: int) -> None:
        event = LayerExecuted(
            layer=layer.layer,
            num_tokens=num_tokens,
            num_active_experts=num_active,
            num_expert_rows=num_rows,
            touched_bytes=num_active * layer.expert_bytes,
        )
        for listener in self.listeners:
            listener(event)


def add_in_top_k_order(expert_rows: Tensor, top_k_weights: Tensor) -> Tensor:
    """Sum weight * row over k: (n_tokens, top_k, hidden_size) -> (n_tokens, hidden_size).

    A fixed order of fp32 additions, first to last: the same bits whoever computed the rows.
    """
    weights = top_k_weights.float()
    total = expert_rows[:, 0] * weights[:, 0, None]
    for k in range(1, expert_rows.shape[1]):
        total += expert_rows[:, k] * weights[:, k, None]
    return total

"""Computes every expert in plain torch from unpacked weights: slow, but correct by definition."""

import torch
from torch import Tensor

from tandem.experts.execution.batch import ExpertFunctions, RoutedCall
from tandem.experts.execution.executor import Executor
from tandem.experts.store.host_store import HostLayer
from tandem.experts.store.packed_layer import PackedLayer
from tandem.kernels.reference import ExpertWeights, expert_ffn


class ReferenceExecutor(Executor):
    """Computes the results with which the results of kernels and devices are compared."""

    def compute(self, call: RoutedCall, functions: ExpertFunctions) -> Tensor:
        """Compute a call expert by expert; see `execute`."""
        layer, hidden, top_k_index, top_k_weights = call
        host = self.store[layer]
        out = torch.zeros(hidden.shape, dtype=torch.float32, device="cpu")
        for expert in top_k_index.unique().tolist():
            if not 0 <= expert < host.arrivals.num_experts:
                continue  # a router's padding
            token, place = (top_k_index == expert).nonzero(as_tuple=True)
            rows = self.rows(host, expert, hidden[token].float(), functions)
            if functions.post_norm is not None:
                rows = functions.post_norm(rows.to(hidden.dtype)).float()
            out.index_add_(0, token, rows * top_k_weights[token, place, None].float())
        return out.to(hidden.dtype)

    def rows(
        self, host: HostLayer, expert: int, rows: Tensor, functions: ExpertFunctions
    ) -> Tensor:
        """Compute one expert; its inputs and results are (n_tokens, hidden_size) fp32."""
        if host.input_order is not None:
            rows = rows[:, host.input_order[expert].long()]
        activate = functions.activate
        # Packed layers have the gate before up, whatever the model's order.
        if isinstance(host, PackedLayer):
            activate = functions.unpacked_activate or activate
        return expert_ffn(rows, self.weights(host, expert), activate)

    def weights(self, host: HostLayer, expert: int) -> ExpertWeights:
        """Return one expert's unpacked weights."""
        return host.weights(expert)

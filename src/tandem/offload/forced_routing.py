"""Forces a recorded routing onto a model, so that speed is measured under what real routers chose.

Wraps an executor: the model's own choice is replaced on its way to the experts. What the model then
says means nothing.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.core.errors import ConfigError
from tandem.offload.batch import ExpertFunctions
from tandem.offload.events import Listener
from tandem.offload.executor import Executor
from tandem.trace import RoutingTrace


class ForcedRouting:
    """An executor in which every token is routed as the next token of a trace, from its begin."""

    def __init__(self, inner: Executor, trace: RoutingTrace) -> None:
        """Hand everything to `inner`; `ConfigError` for a trace of another shape."""
        meta = trace.meta
        num_experts = max(layer.arrivals.num_experts for layer in inner.store)
        if (meta.n_moe_layers, meta.n_experts) != (len(inner.store), num_experts):
            raise ConfigError(
                f"the trace is of a model with {meta.n_moe_layers} MoE layers of {meta.n_experts} "
                f"experts, and this one has {len(inner.store)} of {num_experts}; replay it on a "
                "model of the same shape"
            )
        self.inner = inner
        self.store = inner.store
        self.listeners: list[Listener] = inner.listeners
        self._trace = trace
        self._at = 0
        self._tokens: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None

    def begin_step(self, token_ids: Sequence[int], *, is_prefill: bool) -> None:
        """Let the next layer begin with the trace's next tokens."""
        self._tokens = None
        self.inner.begin_step(token_ids, is_prefill=is_prefill)

    def execute(
        self,
        layer: int,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        functions: ExpertFunctions,
    ) -> Tensor:
        """Compute a layer with the trace's experts; weights are the trace's, or all equal."""
        num_tokens = len(hidden)
        if self._tokens is None or len(self._tokens) != num_tokens:
            self._tokens = np.arange(self._at, self._at + num_tokens) % self._trace.num_tokens
            self._at += num_tokens
        index = torch.from_numpy(self._trace.experts[self._tokens, layer].astype(np.int64))
        if self._trace.weights is None:
            weights = torch.full(index.shape, 1.0 / index.shape[1])
        else:
            weights = torch.from_numpy(self._trace.weights[self._tokens, layer]).float()
        device = top_k_index.device
        return self.inner.execute(layer, hidden, index.to(device), weights.to(device), functions)

    def close(self) -> None:
        """Close the executor within."""
        self.inner.close()

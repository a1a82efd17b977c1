"""Forces a recorded routing onto a model, so that speed is measured under what real routers chose.

Wraps an executor: the model's own choice is replaced on its way to the experts. What the model then
says means nothing.
"""

from collections.abc import Sequence

import numpy as np
import torch

from tandem.core.errors import ConfigError
from tandem.offload.executor import Executor, RoutedCall
from tandem.offload.passing_executor import PassingExecutor
from tandem.trace import RoutingTrace


class ForcedRouting(PassingExecutor):
    """An executor in which every token is routed as the next token of a trace, from its begin."""

    def __init__(self, inner: Executor, trace: RoutingTrace) -> None:
        """Hand everything to `inner`; `ConfigError` for a trace of another shape."""
        super().__init__(inner)
        meta = trace.meta
        num_experts = max(layer.arrivals.num_experts for layer in inner.store)
        if (meta.n_moe_layers, meta.n_experts) != (len(inner.store), num_experts):
            raise ConfigError(
                f"the trace is of a model with {meta.n_moe_layers} MoE layers of {meta.n_experts} "
                f"experts, and this one has {len(inner.store)} of {num_experts}; replay it on a "
                "model of the same shape"
            )
        self._trace = trace
        self._at = 0
        self._tokens: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None

    def begin_step(self, token_ids: Sequence[int], *, is_prefill: bool) -> None:
        """Let the next layer begin with the trace's next tokens."""
        self._tokens = None
        super().begin_step(token_ids, is_prefill=is_prefill)

    def before(self, call: RoutedCall) -> RoutedCall:
        """Take the trace's experts instead; weights are the trace's, or all equal."""
        num_tokens, device = len(call.hidden), call.top_k_index.device
        if self._tokens is None or len(self._tokens) != num_tokens:
            self._tokens = np.arange(self._at, self._at + num_tokens) % self._trace.num_tokens
            self._at += num_tokens
        index = torch.from_numpy(self._trace.experts[self._tokens, call.layer].astype(np.int64))
        if self._trace.weights is None:
            weights = torch.full(index.shape, 1.0 / index.shape[1])
        else:
            weights = torch.from_numpy(self._trace.weights[self._tokens, call.layer]).float()
        return call._replace(top_k_index=index.to(device), top_k_weights=weights.to(device))

"""Forces a recorded routing onto a model, so that speed is measured with real routers' choices.

Wraps an executor and replaces the model's own choice, so that answers are meaningless.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.core.errors import ConfigError
from tandem.experts.execution.batch import ExpertFunctions, RoutedCall
from tandem.experts.execution.executor import DirectCall, Executor
from tandem.experts.execution.passing_executor import PassingExecutor
from tandem.policy.step_path import MAX_GRAPH_TOKENS
from tandem.trace import RoutingTrace

_Tokens = np.ndarray[tuple[int], np.dtype[np.int64]]


class ForcedRouting(PassingExecutor):
    """An executor that routes each token as the next token of a trace, from the trace's start."""

    def __init__(self, inner: Executor, trace: RoutingTrace) -> None:
        """Forward to `inner`; raises `ConfigError` for a trace of a model of another shape."""
        super().__init__(inner)
        meta = trace.meta
        num_experts = max((x.arrivals.num_experts for x in inner.store), default=0)
        if (meta.n_moe_layers, meta.n_experts) != (len(inner.store), num_experts):
            raise ConfigError(
                f"the trace is of a model with {meta.n_moe_layers} MoE layers of {meta.n_experts} "
                f"experts, and this one has {len(inner.store)} of {num_experts}; replay it on a "
                "model of the same shape"
            )
        self._trace = trace
        self._at = 0
        self._tokens: _Tokens | None = None
        # (number of tokens, device) -> choices.
        self._choices: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        self._there: tuple[Tensor, Tensor] | None = None  # the step's choices on the model's device

    def begin_step(self, token_ids: Sequence[int], *, is_prefill: bool) -> None:
        """Advance to the trace's next tokens."""
        self._tokens = self._take(len(token_ids)) if token_ids else None
        self._there = None
        for (num_tokens, _), kept in self._choices.items():
            # A step on a GPU may have padding tokens.
            if len(token_ids) == num_tokens or 0 < len(token_ids) < num_tokens <= MAX_GRAPH_TOKENS:
                self._fill(*kept)
        super().begin_step(token_ids, is_prefill=is_prefill)

    def before(self, call: RoutedCall) -> RoutedCall:
        """Replace the choice by the trace's; weights are the trace's, or equal if it has none."""
        num_tokens, device = len(call.hidden), call.top_k_index.device
        if self._tokens is None or len(self._tokens) != num_tokens:
            self._tokens = self._take(num_tokens)
            self._there = None
        if self._there is None:
            self._there = self._copied(self._tokens, device)
        index, weights = self._there
        return call._replace(top_k_index=index[call.layer], top_k_weights=weights[call.layer])

    def direct_call(self, call: RoutedCall, functions: ExpertFunctions) -> DirectCall | None:
        """Return the direct call of the wrapped executor, which reads the trace's choice."""
        choice = self.choices(call.layer, len(call.hidden), torch.device("cpu"))
        forced = RoutedCall(call.layer, call.hidden, *choice)
        native = self.inner.direct_call(forced, functions)
        return None if native is None else native._replace(choice=choice)

    def _copied(self, tokens: _Tokens, device: torch.device) -> tuple[Tensor, Tensor]:
        """Copy the choices of all layers to a device at once; to a GPU without waiting.

        Copying layer by layer would wait twice per layer, and the waits would be measured.
        """
        kept = []
        for choice in self._choice(tokens, slice(None)):
            of_layers = choice.transpose(0, 1).contiguous()  # (n_layers, n_tokens, top_k)
            host = of_layers.pin_memory() if device.type == "cuda" else of_layers
            kept.append(host.to(device, non_blocking=True))
        return kept[0], kept[1]

    @property
    def top_k(self) -> int:
        """The number of experts of each token."""
        return int(self._trace.experts.shape[-1])

    def choices(self, layer: int, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return experts and weights (num_tokens, top_k) of a layer in a replayed step.

        The tensors keep their addresses, and each step of this size fills them at its beginning.
        """
        key = num_tokens, device
        if key not in self._choices:
            shape = (self._trace.meta.n_moe_layers, num_tokens, self.top_k)
            # Steps write to them inside or outside inference mode.
            with torch.inference_mode(False):
                index = torch.zeros(shape, dtype=torch.int64, device=device)
                kept = index, torch.zeros(shape, device=device)
            if self._tokens is not None and len(self._tokens) <= num_tokens:
                self._fill(*kept)
            self._choices[key] = kept
        index, weights = self._choices[key]
        return index[layer], weights[layer]

    def _take(self, num_tokens: int) -> _Tokens:
        taken = np.arange(self._at, self._at + num_tokens) % self._trace.num_tokens
        self._at += num_tokens
        return taken

    def _fill(self, *kept: Tensor) -> None:
        """Write the step's choices; padding tokens repeat the choices of the step's tokens."""
        assert self._tokens is not None
        tokens = np.resize(self._tokens, kept[0].shape[1])
        for each, now in zip(kept, self._copied(tokens, kept[0].device), strict=True):
            each.copy_(now, non_blocking=True)

    def _choice(self, tokens: _Tokens, layers: int | slice) -> tuple[Tensor, Tensor]:
        index = torch.from_numpy(self._trace.experts[tokens, layers].astype(np.int64))
        if self._trace.weights is None:
            return index, torch.full(index.shape, 1.0 / index.shape[-1], device="cpu")
        return index, torch.from_numpy(self._trace.weights[tokens, layers]).float()

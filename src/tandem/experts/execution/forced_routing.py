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
from tandem.policy.plan import LayerLoad
from tandem.policy.step_path import MAX_GRAPH_TOKENS
from tandem.trace import RoutingTrace

_Tokens = np.ndarray[tuple[int], np.dtype[np.int64]]


class ForcedRouting(PassingExecutor):
    """An executor that routes the model's tokens as a trace's tokens, from the trace's start."""

    def __init__(self, inner: Executor, trace: RoutingTrace) -> None:
        """Wrap `inner`; raises `ConfigError` if the trace's model has another shape."""
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

    def expect(self, known: Sequence[LayerLoad]) -> None:
        """No-op: the loads known from token ids are not those of the trace."""

    def begin_step(self, token_ids: Sequence[int], *, is_prefill: bool) -> None:
        """Take as many next tokens of the trace as the step has; announce the step."""
        self._tokens = self._take(len(token_ids)) if token_ids else None
        self._there = None
        for (num_tokens, _), kept in self._choices.items():
            # A step on a GPU may have padding tokens.
            if len(token_ids) == num_tokens or 0 < len(token_ids) < num_tokens <= MAX_GRAPH_TOKENS:
                self._fill(*kept)
        super().begin_step(token_ids, is_prefill=is_prefill)

    def before(self, call: RoutedCall) -> RoutedCall:
        """Return the call with the trace's experts and weights; equal weights if it has none."""
        num_tokens, device = len(call.hidden), call.top_k_index.device
        if self._tokens is None or len(self._tokens) != num_tokens:
            self._tokens = self._take(num_tokens)
            self._there = None
        if self._there is None:
            self._there = self._copied(self._tokens, device)
        index, weights = self._there
        return call._replace(top_k_index=index[call.layer], top_k_weights=weights[call.layer])

    def direct_call(self, call: RoutedCall, functions: ExpertFunctions) -> DirectCall | None:
        """Return the wrapped executor's direct call with the trace's choice for the router's.

        Returns None if the wrapped executor has no direct call.
        """
        choice = self.choices(call.layer, len(call.hidden), torch.device("cpu"))
        forced = RoutedCall(call.layer, call.hidden, *choice)
        native = self.inner.direct_call(forced, functions)
        return None if native is None else native._replace(choice=choice)

    def _copied(self, tokens: _Tokens, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return these tokens' experts and weights in all layers on a device.

        Both are (n_layers, n_tokens, top_k); the copy to a GPU is queued without waiting. Copying
        layer by layer would wait twice per layer, and the waits would be measured.
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
        """Return tensors for a layer's experts and weights (num_tokens, top_k) in replayed steps.

        Their addresses stay the same; `begin_step` fills them for each step of this size.
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
        """Write the step's experts and weights of all layers into the two tensors `kept`.

        Padding tokens repeat the choices of the step's tokens.
        """
        assert self._tokens is not None
        tokens = np.resize(self._tokens, kept[0].shape[1])
        for each, now in zip(kept, self._copied(tokens, kept[0].device), strict=True):
            each.copy_(now, non_blocking=True)

    def _choice(self, tokens: _Tokens, layers: int | slice) -> tuple[Tensor, Tensor]:
        index = torch.from_numpy(self._trace.experts[tokens, layers].astype(np.int64))
        if self._trace.weights is None:
            return index, torch.full(index.shape, 1.0 / index.shape[-1], device="cpu")
        return index, torch.from_numpy(self._trace.weights[tokens, layers]).float()

"""Notes what the routers choose while a model runs, and makes a routing trace of it.

Wraps an executor: the routing is read on its way to the experts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.offload.batch import ExpertFunctions
from tandem.offload.events import Listener
from tandem.offload.executor import Executor
from tandem.policy.plan import Geometry
from tandem.trace import RoutingTrace, TraceMeta

Array = npt.NDArray[Any]
# Under this key of a trace's meta stands how many tokens of each sequence ran as its prompt.
PROMPT_TOKENS = "prompt_tokens"


class RoutingRecorder:
    """An executor that records sequences, one after the other or several side by side."""

    def __init__(self, inner: Executor) -> None:
        """Hand everything to `inner`."""
        self.inner = inner
        self.store = inner.store
        self.listeners: list[Listener] = inner.listeners
        self._batch = 1
        self._is_recording = False
        self._steps: list[list[tuple[Array, Array]]] = []  # by step and layer: experts, weights
        self._ids: list[Array] = []
        self._sequences: list[tuple[Array, Array, Array, int]] = []

    def begin_sequences(self, batch: int = 1) -> None:
        """Begin `batch` sequences side by side; those before have ended."""
        self._finish()
        self._batch = batch
        self._is_recording = True

    def pause(self) -> None:
        """End the sequences; record nothing until the next ones begin."""
        self._finish()
        self._is_recording = False

    def begin_step(self, token_ids: Sequence[int], *, is_prefill: bool) -> None:
        """Note the tokens of a step."""
        if self._is_recording:
            self._steps.append([])
            self._ids.append(np.array(token_ids, dtype=np.int32))
        self.inner.begin_step(token_ids, is_prefill=is_prefill)

    def execute(
        self,
        layer: int,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        functions: ExpertFunctions,
    ) -> Tensor:
        """Note a layer's routing and compute the layer."""
        if self._is_recording:
            weights = top_k_weights.detach().to("cpu", torch.float16).numpy().copy()
            self._steps[-1].append((top_k_index.to("cpu").numpy().copy(), weights))
        return self.inner.execute(layer, hidden, top_k_index, top_k_weights, functions)

    def close(self) -> None:
        """Close the executor within."""
        self.inner.close()

    def trace(self, model: str, **more: Any) -> RoutingTrace:
        """Return everything recorded so far as a trace; `more` goes into its meta."""
        self._finish()
        if not self._sequences:
            raise ModelError(
                "nothing was recorded: the model has not run since the recording began"
            )
        experts, weights, ids, prompts = zip(*self._sequences, strict=True)
        num_experts = max(layer.arrivals.num_experts for layer in self.store)
        geometry = Geometry(experts[0].shape[1], num_experts, experts[0].shape[2])
        meta = TraceMeta(
            model=model,
            n_moe_layers=geometry.num_layers,
            n_experts=geometry.num_experts,
            top_k=geometry.top_k,
            more={PROMPT_TOKENS: list(prompts), **more},
        )
        small = np.uint8 if num_experts <= 256 else np.uint16
        trace = RoutingTrace(
            meta=meta,
            experts=np.concatenate(experts).astype(small),
            seq_offsets=np.cumsum([0, *map(len, experts)]).astype(np.int64),
            weights=np.concatenate(weights),
            token_ids=np.concatenate(ids),
        )
        trace.check("the recording")
        return trace

    def _finish(self) -> None:
        """Turn the steps since `begin_sequences` into sequences."""
        steps = [
            (
                np.stack([e for e, _ in layers], axis=1),
                np.stack([w for _, w in layers], axis=1),
                ids,
            )
            for layers, ids in zip(self._steps, self._ids, strict=True)
            if layers
        ]  # each (n_tokens, n_layers, top_k), with rows of the batch one after another
        self._steps, self._ids = [], []
        if not steps:
            return
        for row in range(self._batch):
            cut = [tuple(np.array_split(a, self._batch)[row] for a in step) for step in steps]
            experts, weights, ids = (np.concatenate(part) for part in zip(*cut, strict=True))
            self._sequences.append((experts, weights, ids, len(cut[0][0])))

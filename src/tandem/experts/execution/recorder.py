"""Records routers' choices while a model runs, and returns them as a routing trace.

Wraps an executor and reads the routing of each call.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.experts.execution.batch import RoutedCall
from tandem.experts.execution.executor import Executor
from tandem.experts.execution.passing_executor import PassingExecutor
from tandem.trace import RoutingTrace, TraceMeta

Array = npt.NDArray[Any]
# Key of a trace's meta: how many tokens of each sequence ran as its prompt.
PROMPT_TOKENS = "prompt_tokens"


# Returns predictions for the layer after the given one, which has just been computed: predictor ->
# (n_tokens, k).
Guesses = Callable[[int], Mapping[str, Tensor]]


class _Step(NamedTuple):
    """One step's tokens, and each layer's choice and guesses; arrays are (n_tokens, ...)."""

    ids: Array
    experts: list[Array]
    weights: list[Array]
    guesses: list[dict[str, Array]]  # of each layer for the next one


class _Sequence(NamedTuple):
    """The tokens and the routing of one finished sequence."""

    ids: Array  # (n_tokens,)
    experts: Array  # (n_tokens, n_layers, top_k)
    weights: Array
    predicted: Array | None  # (n_tokens, n_layers, predictors, k)
    prompt_tokens: int


class RoutingRecorder(PassingExecutor):
    """Records routers' choices for one sequence or a batch of sequences of equal length."""

    def __init__(
        self,
        inner: Executor,
        guesses: Guesses | None = None,
        predictors: Sequence[str] = (),
        *,
        hears_of_drafts: bool = False,
        by_token: Sequence[int] = (),
    ) -> None:
        """Wrap `inner`; `guesses`, if given, returns the predictions of all `predictors`.

        `by_token` are the layers routed by token id. With `hears_of_drafts`, steps of one sequence
        may verify drafted tokens; the caller must then report rejected tokens by `keep`.
        """
        super().__init__(inner)
        self.takes_drafts = hears_of_drafts
        self._guesses = guesses
        self._predictors, self._by_token = tuple(predictors), tuple(by_token)
        self._batch = 1
        self._is_recording = False
        self._steps: list[_Step] = []
        self._sequences: list[_Sequence] = []

    def begin_sequences(self, batch: int = 1) -> None:
        """End the earlier sequences; record the next steps as those of `batch` new sequences."""
        self._finish()
        self._batch = batch
        self._is_recording = True

    def pause(self) -> None:
        """End the sequences; record nothing until the next `begin_sequences`."""
        self._finish()
        self._is_recording = False

    def begin_step(self, token_ids: Sequence[int], *, is_prefill: bool) -> None:
        """Record the tokens of a step, and announce the step to the wrapped executor."""
        if self._is_recording:
            self._steps.append(_Step(np.array(token_ids, dtype=np.int32), [], [], []))
        super().begin_step(token_ids, is_prefill=is_prefill)

    def keep(self, num_tokens: int, num_kept: int) -> None:
        """Keep the first `num_kept` tokens of the last step; the others were rejected drafts."""
        assert self._batch == 1
        if not self._is_recording:
            return
        step, some = self._steps[-1], slice(num_kept)
        assert len(step.ids) == num_tokens
        self._steps[-1] = _Step(
            step.ids[some],
            [of_layer[some] for of_layer in step.experts],
            [of_layer[some] for of_layer in step.weights],
            [{name: ids[some] for name, ids in found.items()} for found in step.guesses],
        )

    def after(self, call: RoutedCall) -> None:
        """Record a layer's choice, gate weights and predictions for the next layer."""
        layer = call.layer
        # If a layer comes again before the next step begins, it has already been recorded.
        if self._is_recording and len(self._steps[-1].experts) == layer:
            step = self._steps[-1]
            step.experts.append(call.top_k_index.to("cpu").numpy().copy())
            weights = call.top_k_weights.detach().to("cpu", torch.float16)
            step.weights.append(weights.numpy().copy())
            guesses = self._guesses(layer) if self._guesses is not None else {}
            step.guesses.append({name: ids.numpy().copy() for name, ids in guesses.items()})

    def trace(self, model: str, **more: object) -> RoutingTrace:
        """End the sequences; return everything recorded so far as a trace with `more` in its meta.

        Raises `ModelError` if nothing was recorded.
        """
        self._finish()
        found = self._sequences
        if not found:
            raise ModelError(
                "nothing was recorded: the model has not run since the recording began"
            )
        num_experts = max(layer.arrivals.num_experts for layer in self.store)
        small = np.uint8 if num_experts <= 256 else np.uint16
        predicted = [s.predicted.astype(small) for s in found if s.predicted is not None]
        has_guesses = len(predicted) == len(found)
        meta = TraceMeta(
            model=model,
            n_moe_layers=found[0].experts.shape[1],
            n_experts=num_experts,
            top_k=found[0].experts.shape[2],
            predictors=self._predictors if has_guesses else (),
            by_token=self._by_token,
            more={PROMPT_TOKENS: [s.prompt_tokens for s in found], **more},
        )
        trace = RoutingTrace(
            meta=meta,
            experts=np.concatenate([s.experts for s in found]).astype(small),
            seq_offsets=np.cumsum([0, *(len(s.ids) for s in found)]).astype(np.int64),
            weights=np.concatenate([s.weights for s in found]),
            token_ids=np.concatenate([s.ids for s in found]),
            predicted=np.concatenate(predicted) if has_guesses else None,
        )
        trace.check("the recording")
        return trace

    def _finish(self) -> None:
        """Split the steps since `begin_sequences` into the batch's sequences, now finished."""
        steps = [step for step in self._steps if step.experts]
        self._steps = []
        if not steps:
            return
        predicted = [self._predicted(step) for step in steps]

        def row_of(arrays: Sequence[Array], row: int) -> Array:
            return np.concatenate([np.array_split(a, self._batch)[row] for a in arrays])

        for row in range(self._batch):
            known = [array for array in predicted if array is not None]
            self._sequences.append(
                _Sequence(
                    row_of([step.ids for step in steps], row),
                    row_of([np.stack(step.experts, axis=1) for step in steps], row),
                    row_of([np.stack(step.weights, axis=1) for step in steps], row),
                    row_of(known, row) if len(known) == len(steps) else None,
                    len(steps[0].ids) // self._batch,
                )
            )

    def _predicted(self, step: _Step) -> Array | None:
        """Return a step's predictions (n_tokens, n_layers, predictors, k); None if one is missing.

        The first layer has no prediction, only zeros.
        """
        ahead = step.guesses[:-1]
        if not self._predictors or any(set(g) != set(self._predictors) for g in ahead):
            return None
        by_layer = [np.stack([g[name] for name in self._predictors], axis=1) for g in ahead]
        if not by_layer:
            return None
        return np.stack([np.zeros_like(by_layer[0]), *by_layer], axis=1)

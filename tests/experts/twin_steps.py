"""Captured steps without a GPU: the caller's thread is the device's stream.

The coordinator that answers a GPU's captured steps answers these, so its tests need no GPU.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tandem.core.errors import ExecutionError
from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.execution.batch import ExpertFunctions, RoutedCall
from tandem.experts.execution.captured_steps import PATIENCE_SECONDS, CapturedSteps
from tandem.experts.execution.executor import DirectCall
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.experts.execution.routed_layers import native_layer
from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads
from tandem.kernels.native import TOKEN_DTYPES
from tandem.policy.plan import LayerLoad
from tandem.policy.step_path import CAPTURE_SIZES, MAX_GRAPH_TOKENS, capture_size


class TwinSteps(CapturedSteps):
    """The captured steps of an expert cache on the emulated device, for tokens of one dtype."""

    def __init__(
        self,
        cache: ExpertCache,
        layers: Sequence[_native.RoutedLayer],
        threads: CpuThreads,
        dtype: torch.dtype,
        *,
        bytes_per_second: float | None = None,
    ) -> None:
        """Start the coordinator's threads; `threads` compute the hits."""
        geometry = cache.geometry
        # No tensor: a step that is being recorded must not see this work.
        table = np.zeros((geometry.num_layers, geometry.num_experts), dtype=np.int64)
        super().__init__(cache, layers, threads, table, bytes_per_second=bytes_per_second)
        self._dtype = dtype
        self._twins: dict[int, tuple[int, _native.TwinStream]] = {}
        for rows in CAPTURE_SIZES:
            box = self.coordinator.add_mailbox(rows, geometry.top_k, TOKEN_DTYPES[dtype])
            twin = _native.TwinStream(self.coordinator, box, table, threads.engine, 0, 0)
            twin.set_patience(PATIENCE_SECONDS)
            self._twins[rows] = box, twin
        self._twin = self._twins[1][1]  # of the step under way

    def serves(self, call: RoutedCall) -> bool:
        """Tell whether native code can read a call's tensors directly."""
        _, hidden, index, weights = call
        if hidden.dtype is not self._dtype or index.dtype is not torch.int64:
            return False
        return hidden.shape[0] <= MAX_GRAPH_TOKENS and weights.dtype in TOKEN_DTYPES

    def begin(self, num_tokens: int, known: Sequence[LayerLoad]) -> None:
        """Begin a step of at most `MAX_GRAPH_TOKENS` tokens."""
        box, self._twin = self._twins[capture_size(num_tokens)]
        self.begin_on(box, num_tokens, known)

    def run(self, call: RoutedCall) -> Tensor:
        """Compute a layer of the step; raises `StepLostError` if no answer comes."""
        assert self.is_under_way
        hidden, index, weights = [tensor.contiguous() for tensor in call.tensors]
        out = torch.empty_like(hidden)
        self._twin.run((call.layer, hidden, index, weights, out))
        return out

    def direct_call(
        self, call: RoutedCall, functions: ExpertFunctions, finish: Callable[[], None]
    ) -> DirectCall | None:
        """Return a recorded layer's call, ended by `finish`; None if the layer is planned."""
        native = native_layer(self._cache.store[call.layer], functions)
        if native is None or not self.serves(call):
            return None
        is_last = call.layer == len(self._cache.store) - 1
        report = (lambda index, num_active: finish()) if is_last else None
        return DirectCall(native, None, report, partial(self._add_to, call.layer))

    def _add_to(
        self, layer: int, program: _native.Program, tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> None:
        """Add a layer (hidden, index, weights, out) to a program for captured steps."""
        rows = capture_size(len(tensors[0]))
        self._twins[rows][1].add_to(program, (layer, *tensors))


class TwinExecutor(HybridExecutor):
    """A hybrid executor that passes decode steps of few tokens to `captured`, if there is one."""

    @property
    def _twin(self) -> TwinSteps | None:
        return self.captured if isinstance(self.captured, TwinSteps) else None

    def begin_step(self, token_ids: Sequence[int], *, is_prefill: bool) -> None:
        super().begin_step(token_ids, is_prefill=is_prefill)
        if token_ids and not is_prefill:
            self.repeat_step(len(token_ids))

    def repeat_step(self, num_tokens: int) -> None:
        """Begin a captured step if the recording was one; a recording does not call `begin`."""
        twin = self._twin
        if twin is None or num_tokens > MAX_GRAPH_TOKENS:
            return
        with self._turn:
            self._announced, self._last_layer = None, -1
            twin.abort()
            self.settle()
            try:
                twin.begin(num_tokens, self.take_known())
            except RuntimeError as error:
                raise ExecutionError(f"a decode step cannot begin ({error}); try again") from error

    def direct_call(self, call: RoutedCall, functions: ExpertFunctions) -> DirectCall | None:
        twin = self._twin
        return None if twin is None else twin.direct_call(call, functions, self._finish_replayed)

    def _finish_replayed(self) -> None:
        """End a captured step whose layers a recording computed."""
        assert self.captured is not None
        with self._turn, self._losing_at_most_a_step():
            self.captured.finish(has_listeners=bool(self.listeners))
            self.captured.report(self.listeners)  # no device runs meanwhile

    def _compute(self, call: RoutedCall, functions: ExpertFunctions) -> Tensor:
        twin = self._twin
        if twin is None or not twin.is_under_way:
            return super()._compute(call, functions)
        if call.layer <= self._last_layer or not twin.serves(call):
            self._last_layer = len(self.store)  # a planned step begins
            return super()._compute(call, functions)
        self._last_layer = call.layer
        out = twin.run(call)
        if call.layer == len(self.store) - 1:
            twin.finish(has_listeners=bool(self.listeners))
            twin.report(self.listeners)
        return out

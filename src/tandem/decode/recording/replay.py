"""Decode steps from a recorded graph: recorded, compared with the model's own, then trusted.

A step that cannot be recorded, or whose recorded graph gives other logits, costs nothing but time:
the model goes on by itself, and `why_not` says why. From the first step on the answer is the
recorded graph's, whose last digits are not the model's: else a request that joins a batch of a
size that is new would be answered otherwise than alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandem.decode.recording.recorded_graph import RecordedGraph
from tandem.decode.recording.recorder import NotRecordableError, Recorder
from tandem.experts.tracing.events import unheard
from tandem.kernels.dense import CpuThreads

_COMPARED_STEPS = 3
# Fused operations may round the last digit of bf16 differently, and near ties of a router flip.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}


class ReplayedStep:
    """One decode step for a fixed number of rows, from the model or from its recorded graph."""

    def __init__(
        self,
        step: Callable[[], Tensor],
        inputs: list[Tensor],
        dtype: Any,
        threads: CpuThreads | None = None,
        executor: Any = None,
    ) -> None:
        """Take the model's own step, whose `inputs` are tensors that the caller overwrites.

        A step may be done twice: what it writes to a KV cache is the same both times, and the
        listeners of `executor` hear of it once.
        """
        self._executor = executor
        self._step = step
        self._threads = threads
        self._inputs = inputs
        self._tolerance = _TOLERANCES.get(dtype)
        self._recorded: RecordedGraph | None = None
        self._num_equal = 0
        self.why_not: str | None = None if self._tolerance else f"the model is {dtype}"
        """Why steps are not replayed; None: they are, or it is not known yet."""

    @property
    def is_replaying(self) -> bool:
        """Tell whether steps come from the recorded graph."""
        return self._recorded is not None and self._num_equal >= _COMPARED_STEPS

    @property
    def recorded(self) -> RecordedGraph | None:
        """The recorded graph, once steps come from it."""
        return self._recorded if self.is_replaying else None

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        """Do the step; return what it returns."""
        if self._recorded is not None and self.is_replaying:
            return self._recorded.run()
        if self.why_not is not None:
            return self._step()
        result = self._step() if self._recorded is not None else self._record()
        return result if self._recorded is None else self._compared(result)

    def _record(self) -> Tensor:
        recorder = Recorder()
        try:
            with recorder:
                result = self._step()
            self._recorded = RecordedGraph(recorder.recording, result, self._inputs, self._threads)
        except (NotRecordableError, StopIteration, RuntimeError, TypeError, ValueError) as error:
            self.why_not = str(error).partition("\n")[0] or type(error).__name__
            return self._step()
        return result

    def _compared(self, expected: Tensor) -> Tensor:
        """Return what the graph gives for a step that the model has done, if that is the same."""
        assert self._recorded is not None
        assert self._tolerance is not None
        try:
            with unheard(self._executor):
                result = self._recorded.run()
        except (RuntimeError, TypeError, ValueError, NameError) as error:
            self._give_up(str(error).partition("\n")[0])
            return expected
        difference = (result.float() - expected.float()).norm()
        if difference <= self._tolerance * expected.float().norm():
            self._num_equal += 1
            return result
        self._give_up("its recorded graph gives other logits")
        return expected

    def _give_up(self, why: str) -> None:
        self._recorded, self.why_not = None, why

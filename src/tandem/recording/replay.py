"""A decode step that is recorded, compared with the model's own code, then replayed.

The recording is a recorded graph on the CPU (`recorded_graph.record_step`) or captured CUDA graphs
on a GPU (`tandem.decode.cuda.graphs`). This module decides for both when a recording is trusted.

If a step cannot be recorded, or its recording keeps giving other logits, the model's own code runs,
which only costs time; `why_not` then has the reason. Even steps that are still compared return the
recording's result, whose last digits differ from the model's. Otherwise a request that joins a
batch of a new size would get another answer than alone.
"""

import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tandem.core.errors import ModelError, TandemWarning
from tandem.experts.execution.executor import Executor, unheard
from tandem.recording.recorder import NotRecordableError

# A recording is trusted after this many equal steps in a row, or after one if recordings of other
# sizes are trusted.
_EQUAL_STEPS = 3
# A wrong recording gives other logits in every step. If two experts have almost equal scores for a
# token, a correct recording may choose the other one, but that is rare and hardly happens twice in
# a row.
_DIFFERENT_STEPS = 3

# A recording stays trusted if at least this share of a step's tokens have equal logits. Otherwise
# an answer would depend on the batch composition or on drafted tokens.
_LEAST_SHARE = 0.5

# Exceptions of model code that cannot be recorded, compiled or captured.
_FAILURES = (
    NotRecordableError,
    StopIteration,
    RuntimeError,
    TypeError,
    ValueError,
    NameError,
    AttributeError,
)


class StepRecording(Protocol):
    """A step that can be repeated without the model's code."""

    def run(self) -> Tensor:
        """Run the step; return its result, valid until the next call."""


Record = Callable[[], tuple[Tensor, StepRecording]]


class ReplayedStep:
    """One decode step on fixed tensors: runs the model's own code at first, later its recording."""

    def __init__(
        self,
        step: Callable[[], Tensor],
        record: Record,
        tolerance: float | None,
        *,
        executor: Executor | None = None,
        announce: Callable[[], None] = lambda: None,
        save: Callable[[], Callable[[], None]] = lambda: lambda: None,
        make_room: Callable[[], bool] = lambda: False,
        warns: bool = False,
        is_like_trusted: bool = False,
        why_not: str | None = None,
    ) -> None:
        """`step` is the model's own code; `record` runs it too.

        `record` returns the result and a recording of the step. Until the recording is trusted, a
        step runs twice, by the model's code and then by the recording, and the results are
        compared. So both runs must write the same to a KV cache; the listeners of `executor` hear
        only the first run; `announce` is called before the second run. `save` must save all other
        state that a step changes, and return a function that restores the state. Recorded results
        may deviate by `tolerance`, relative to their norm. `is_like_trusted` tells whether the same
        step of another size is already replayed. `make_room` is called when memory is too short for
        a recording; it returns whether it has freed any. With `warns` a failing recording gives a
        `TandemWarning`; with `why_not` nothing is recorded.
        """
        assert tolerance is not None or why_not is not None
        self._step, self._record, self._tolerance = step, record, tolerance
        self._executor, self._announce, self._save = executor, announce, save
        self._make_room, self._warns = make_room, warns
        self._recording: StepRecording | None = None
        self._least_equal = 1 if is_like_trusted else _EQUAL_STEPS
        self._num_equal = self._num_different = 0
        self.why_not = why_not
        """Why steps are not replayed; None: they are replayed, or that is not known yet."""

    @property
    def is_replaying(self) -> bool:
        """Whether steps run only the recording, without the model's own code."""
        return self._recording is not None and self._num_equal >= self._least_equal

    @property
    def has_settled(self) -> bool:
        """Whether it is settled how steps run: always replayed, or always by the model's code."""
        return self.is_replaying or self.why_not is not None

    @property
    def recording(self) -> StepRecording | None:
        """The recording, if steps run only the recording; else None."""
        return self._recording if self.is_replaying else None

    def trust_sooner(self) -> None:
        """Trust the recording after one equal step, because another process has compared more."""
        self._num_equal = _EQUAL_STEPS - 1

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        """Run the step; return its result, valid until the next call."""
        if self._recording is not None and self.is_replaying:
            return self._recording.run()
        if self.why_not is not None:
            return self._step()
        go_back = self._save()
        if self._recording is not None:
            return self._compared(self._step(), self._recording, go_back)
        try:
            expected, recording = self._record()
        except ModelError:  # the disk failed, which says nothing about the recording
            go_back()
            raise
        except _FAILURES as error:
            self._give_up(error)
            go_back()
            return self._step()
        self._recording = recording
        return self._compared(expected, recording, go_back)

    def _compared(
        self, expected: Tensor, recording: StepRecording, go_back: Callable[[], None]
    ) -> Tensor:
        """Run the recording for a step that the model's code has run, and compare the results.

        `go_back` restores the state before the step. Returns the recording's result if enough of it
        is equal, else `expected`, the model's.
        """
        assert self._tolerance is not None
        go_on = self._save()
        go_back()
        try:
            with unheard(self._executor):
                self._announce()
                result = recording.run()
            share = _share_equal(result.float(), expected.float(), self._tolerance)
        except ModelError:
            go_on()
            raise
        except _FAILURES as error:
            self._give_up(error)
            go_on()
            return expected
        if share == 1.0:
            self._num_equal += 1
            return result
        self._num_equal = 0
        self._num_different += 1
        if self._num_different == _DIFFERENT_STEPS:
            self._give_up(ValueError("its recording gives other logits"))
        elif share >= _LEAST_SHARE:
            return result
        go_on()
        return expected

    def _give_up(self, error: Exception) -> None:
        """Drop the recording: for good, unless memory was too short and has now been freed."""
        self._recording = None
        if isinstance(error, torch.OutOfMemoryError) and self._make_room():
            return
        self.why_not = str(error).partition("\n")[0] or type(error).__name__
        if self._warns:
            warnings.warn(
                f"decode steps run as the model's own code, slower: {self.why_not}",
                TandemWarning,
                stacklevel=2,
            )


def _share_equal(result: Tensor, expected: Tensor, tolerance: float) -> float:
    """Return 1 if two results (n_tokens, any) are close as a whole, else the share of close rows.

    The share is at most 0.99, even if each row is close.
    """
    rows = (result - expected).norm(dim=-1), expected.norm(dim=-1)
    if bool(rows[0].norm() <= tolerance * rows[1].norm()):
        return 1.0
    return min(0.99, float((rows[0] <= tolerance * rows[1]).float().mean()))

"""A decode step as CUDA graphs: between the experts of two layers, nothing but a replay.

The model's own code runs once while its work is captured. Experts are graph breaks: there a graph
segment ends, and the next begins with a tensor that stands for the experts' result. A replay runs
segment, experts, segment, experts, to the end. Everything lies at addresses that stay:

    inputs (ids, positions, masks, KV cache) -> segment -> hidden, choice, weights (kept)
      -> executor -> copied into the result's tensor -> next segment
"""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.core.errors import TandemWarning
from tandem.experts.execution.executor import Executor
from tandem.experts.tracing.events import unheard
from tandem.hf.opaque_calls import EXPERTS, intercepted, opaque
from tandem.kernels.torch_private import end_allocation_to_pool
from tandem.recording.recorded_graph import Fusing, RecordedGraph
from tandem.recording.recorder import NotRecordableError, Recorder
from tandem.recording.replay import ReplayedStep

# How far replayed logits may be off: experts on the GPU and on the CPU round differently, and plans
# change.
TOLERANCES = {torch.float32: 1e-2, torch.bfloat16: 0.1, torch.float16: 0.05}


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Queue it again, on the same memory."""


class Capture(Protocol):
    """Turns work into graphs that share their memory; made again for each step that is captured."""

    def waits(self, *, allowed: bool) -> AbstractContextManager[None]:
        """Raise `RuntimeError` inside where work makes the host wait, unless that is allowed."""

    def begin(self) -> None:
        """Begin a segment: from now on work is noted and not done."""

    def end(self) -> Graph:
        """End the segment."""

    def abandon(self) -> None:
        """Give up the segment that has begun, if any: from now on work is done again."""


class CudaCapture:
    """CUDA graphs on a stream of their own, from one pool of memory."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """Capture on a GPU; inside `on_capture_stream`.

        Captures that share a `stream` share the workspaces that matrix products keep for it.
        """
        self.stream = stream or torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextlib.contextmanager
    def waits(self, *, allowed: bool) -> Iterator[None]:
        """Let torch itself raise before it waits."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it does not find every wait, which it says once
            torch.cuda.set_sync_debug_mode("default" if allowed else "error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def begin(self) -> None:
        """Begin to capture; other threads may go on calling CUDA."""
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Graph:
        """End the capture."""
        assert self._graph is not None
        self._graph.capture_end()
        graph, self._graph = self._graph, None
        return graph

    def abandon(self) -> None:
        """Undo what a broken capture leaves: the stream, the allocator and the random numbers.

        torch (as of 2.11) ends a capture that CUDA calls invalid with an error before it notifies
        its allocator and its generator: the one would go on giving memory of the graph's pool, the
        other refuse to draw.
        """
        graph, self._graph = self._graph, None
        if graph is None:
            return
        device = self.stream.device
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        with contextlib.suppress(RuntimeError):  # the allocator has been notified, or was never
            end_allocation_to_pool(device.index, self._pool)
        generator = torch.cuda.default_generators[device.index]
        with contextlib.suppress(RuntimeError):
            generator.graphsafe_set_state(generator.clone_state())
        with contextlib.suppress(RuntimeError):
            graph.reset()


@contextlib.contextmanager
def on_capture_stream(capture: Capture) -> Iterator[None]:
    """Make a capture's stream the current one, behind and before what is queued elsewhere."""
    if not isinstance(capture, CudaCapture):
        yield
        return
    had_gc = gc.isenabled()
    gc.collect()
    gc.disable()  # what Python frees during a capture would be captured too
    try:
        torch.cuda.synchronize(capture.stream.device)
        before = torch.cuda.current_stream(capture.stream.device)
        capture.stream.wait_stream(before)
        with torch.cuda.stream(capture.stream):
            yield
        before.wait_stream(capture.stream)
    finally:
        if had_gc:
            gc.enable()


class GraphBreak(NamedTuple):
    """A call of the executor between two graph segments."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    result: Tensor


# Returns a router's choice (n_tokens, top_k) with padding for the rows that have no token.
Pad = Callable[[Tensor], Tensor]
# Computes a layer inside a segment, given the executor's arguments; None: a graph break.
Resident = Callable[..., Tensor | None]


class _Padding:
    """Meets the experts of a step that is simply done: rows without a token choose none."""

    is_capturing = True  # the caller has announced the step

    def __init__(self, pad: Pad) -> None:
        self._pad = pad

    def call(self, kind: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return function(*(_padded(args, self._pad) if kind == "experts" else args))


class _DryRun:
    """Does once, outside of a capture, what will be captured; where that would wait, it raises.

    So a step that cannot be captured breaks no capture, which torch does not survive unharmed.
    And kernels are compiled and loaded: CUDA loads no code while it captures, and tables that are
    made on first use would be copied.
    """

    is_capturing = True

    def __init__(self, capture: Capture, resident: Resident | None, pad: Pad) -> None:
        self._capture, self._resident, self._pad = capture, resident, pad

    def call(self, kind: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if kind != "experts":
            return function(*args)
        args = _padded(args, self._pad)
        result = None if self._resident is None else self._resident(*args)
        if result is not None:
            return result
        with self._capture.waits(allowed=True):
            return function(*_handed_over(args))


class _GraphBreaker:
    """Meets the model's opaque calls while it is captured; its experts break the graph."""

    is_capturing = True

    def __init__(self, capture: Capture, resident: Resident | None, pad: Pad) -> None:
        self._capture, self._resident, self._pad = capture, resident, pad
        self.segments: list[tuple[Graph, GraphBreak | None]] = []

    def call(self, kind: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if kind != "experts":
            return function(*args)  # captured like everything else
        args = _padded(args, self._pad)
        if self._resident is not None:
            result = self._resident(*args)
            if result is not None:
                return result
        args = _handed_over(args)
        result = torch.empty_like(args[1])
        self.segments.append((self._capture.end(), GraphBreak(function, args, result)))
        self._capture.begin()
        return result


class _PaddedRecorder(Recorder):
    """Records a step for a capture: its experts stay opaque calls, which a capture meets again."""

    def __init__(self, pad: Pad) -> None:
        super().__init__()
        self._pad = pad

    def call(self, kind: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if kind != EXPERTS:
            return super().call(kind, function, args)
        self._is_paused = True
        try:
            result = function(*_padded(args, self._pad))
        finally:
            self._is_paused = False
        again = partial(opaque, kind, function)
        self._note(again, kind, args, {}, result, has_effects=True)
        return result


def recorded_for_capture(
    step: Callable[[], Tensor], inputs: Sequence[Tensor], fusing: Fusing, pad: Pad
) -> RecordedGraph:
    """Do a step that reads `inputs`; return it as a function of fewer, larger operations.

    Raises `NotRecordableError` for a step that reads tensors' values in Python.
    """
    recorder = _PaddedRecorder(pad)
    with recorder:
        result = step()
    return RecordedGraph(recorder.recording, result, inputs, fusing=fusing)


def _padded(args: tuple[Any, ...], pad: Pad) -> tuple[Any, ...]:
    layer, hidden, index, weights, functions = args
    return layer, hidden, pad(index), weights, functions


def _handed_over(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an executor's arguments as a segment hands them over: dense and each by itself."""
    layer, hidden, index, weights, functions = args
    return layer, hidden.contiguous(), index.contiguous(), weights.contiguous(), functions


class CapturedStep:
    """A captured step: graph segments, and the executor's calls between them."""

    def __init__(
        self,
        segments: list[tuple[Graph, GraphBreak | None]],
        result: Tensor,
        deferring: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Take segments with what comes after each, and the tensor that the last one writes."""
        self._segments, self._result, self._deferring = segments, result, deferring

    @property
    def num_segments(self) -> int:
        """Graphs of the step: one more than it has graph breaks."""
        return len(self._segments)

    def run(self) -> Tensor:
        """Queue the step once more; return its result, valid until the next call."""
        with self._deferring():
            for graph, call in self._segments:
                graph.replay()
                if call is not None:
                    call.result.copy_(call.function(*call.args))
        return self._result


def new_graphed_step(
    step: Callable[[], Tensor],
    dtype: torch.dtype,
    make_capture: Callable[[], Capture],
    find_resident: Callable[[], Resident | None] = lambda: None,
    *,
    pad: Pad = lambda index: index,
    executor: Executor | None = None,
    make_room: Callable[[], bool] = lambda: False,
    deferring: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    record_first: Callable[[], Callable[[], Tensor]] | None = None,
    why_not: str | None = None,
) -> ReplayedStep:
    """Return a decode step that is captured the first time; `step` is the model's own code.

    `record_first` does it and returns it in fewer operations, which are captured in its place.

    `find_resident` is asked at the capture: what it finds holds as long as the segments. Rows
    without a token choose no expert, by `pad`. Replays run inside `deferring`: what experts leave
    to later is done behind the next replay's launch. The rest is as of `ReplayedStep`.
    """

    def plain() -> Tensor:
        with intercepted(_Padding(pad)):
            return step()

    def record() -> tuple[Tensor, CapturedStep]:
        expected = plain().clone()
        with unheard(executor):
            capture = partial(
                _captured, make_capture=make_capture, resident=find_resident(), pad=pad
            )
            segments, result = _shortest(step, record_first, capture)
        return expected, CapturedStep(segments, result, deferring)

    return ReplayedStep(
        plain, record, TOLERANCES.get(dtype),
        executor=executor, make_room=make_room, warns=True, why_not=why_not,
    )  # fmt: skip


# A step's segments, with what comes after each, and the tensor of its result.
Captured = tuple[list[tuple[Graph, GraphBreak | None]], Tensor]


def _shortest(
    step: Callable[[], Tensor],
    record_first: Callable[[], Callable[[], Tensor]] | None,
    capture: Callable[[Callable[[], Tensor]], Captured],
) -> Captured:
    """Capture a step in fewer operations if it can be had so, else as the model does it."""
    if record_first is not None:
        try:
            return capture(record_first())
        except NotRecordableError:
            pass
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton's compilers and tools raise what they like
            first_line = str(error).partition("\n")[0]
            warnings.warn(
                f"decode steps are captured with more kernels than need be: {first_line}",
                TandemWarning,
                stacklevel=2,
            )
    return capture(step)


def _captured(
    step: Callable[[], Tensor],
    make_capture: Callable[[], Capture],
    resident: Resident | None,
    pad: Pad,
) -> Captured:
    """Capture a step.

    It runs once before, which makes what is made lazily: masks, compiled kernels, workspaces.
    """
    capture = make_capture()
    with intercepted(_DryRun(capture, resident, pad)), capture.waits(allowed=False):
        step()
    breaker = _GraphBreaker(capture, resident, pad)
    with on_capture_stream(capture), intercepted(breaker):
        try:
            capture.begin()
            result = step()
            last = capture.end()
        except BaseException:
            capture.abandon()
            raise
    return [*breaker.segments, (last, None)], result

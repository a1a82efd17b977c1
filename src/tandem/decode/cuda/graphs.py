"""A decode step as CUDA graphs: the host replays one graph segment between two layers' experts.

The model's own code runs once while its work is captured. Experts are graph breaks: a graph segment
ends there, and the next segment begins with the tensor that will hold the experts' result. A replay
runs segments and experts in turn, to the end. Reading rows of a table from the disk is a graph
break too. All addresses are fixed:

    inputs (ids, positions, masks, KV cache) -> segment -> hidden, choice, weights (kept)
      -> executor -> copied into the result's tensor -> next segment

A segment of many layers is split into several graphs: a launch takes the host a microsecond per
kernel, and the GPU begins only after the launch.
"""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from tandem.core.errors import ExecutionError, ModelError, TandemWarning
from tandem.devices.cuda.captures import Capture, Graph, on_capture_stream
from tandem.experts.execution.batch import ExpertFunctions
from tandem.experts.execution.executor import Executor, unheard
from tandem.hf.row_tables import room_for_rows
from tandem.kernels import _native
from tandem.kernels.opaque_calls import (
    DISK_ROWS,
    EXPERTS,
    ROUTER_INPUT,
    Meeting,
    intercepted,
    opaque,
)
from tandem.recording.recorded_graph import Fusing, RecordedGraph
from tandem.recording.recorder import NotRecordableError, Recorder
from tandem.recording.replay import ReplayedStep

# How far replayed logits may be off: experts on the GPU and on the CPU round differently, and plans
# change.
TOLERANCES = {torch.float32: 1e-2, torch.bfloat16: 0.1, torch.float16: 0.05}

_DRY_RUNS = 3
# An H100's host launches a layer in 50 us, the GPU computes 95; it waits for the first one only.
LAYERS_A_GRAPH = 4

# Kinds of calls that the host does between segments, or `GraphLayers` inside them.
_BREAKS = (EXPERTS, DISK_ROWS)

# Of an executor: layer, hidden, choice, weights and the model's functions.
ExpertsArguments = tuple[int, Tensor, Tensor, Tensor, ExpertFunctions]


class GraphBreak(NamedTuple):
    """A call between two graph segments: to the executor, or to a reader of rows on the disk."""

    function: Callable[..., Tensor]
    args: tuple[object, ...]
    result: Tensor
    first: tuple[Callable[[], object], ...]
    """Calls made before `function`: reports on the previous segment, such as a router's input."""

    def run(self) -> None:
        """Call everything in `first`, then `function`; queue the copy of its value to `result`."""
        for tell in self.first:
            tell()
        self.result.copy_(self.function(*self.args))


Save = Callable[[], Callable[[], None]]
"""Saves what a step changes and returns the function that restores it."""

# Returns a router's choice (n_tokens, top_k) with padding in the rows of padding tokens.
Pad = Callable[[Tensor], Tensor]


class GraphLayers(Protocol):
    """Computes the experts of a step's MoE layers inside its graph segments."""

    def __call__(
        self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor, functions: ExpertFunctions
    ) -> Tensor | None:
        """Queue a layer's experts and return their result; None: the layer needs a graph break."""

    def take_router_input(self, layer: int, hidden: Tensor) -> bool:
        """Take a layer's router input; return False if the host must get it between segments."""

    def around(self) -> AbstractContextManager[None]:
        """Return a context manager for one run of the step: the dry run or a replay."""

    def give_up(self, error: Exception) -> bool:
        """Handle a failed capture; return whether to try again, without these layers."""


class Announced:
    """Intercepts opaque calls of a step whose token ids the host has announced, and executes them.

    While it is active no code reads ids back from the GPU, for which the host would have to wait.
    """

    is_capturing = True

    def __init__(self, pad: Pad = lambda index: index) -> None:
        """Take `pad`, which removes the experts of padding tokens from each router's choice."""
        self._pad = pad

    def call(self, kind: str, function: Callable[..., Tensor], args: tuple[object, ...]) -> Tensor:
        """Make the call and return its result; see `Interceptor`."""
        return function(*(_padded(args, self._pad) if kind == EXPERTS else args))


class _DryRun:
    """Intercepts calls of the dry run, in which code that waits for the GPU raises an error.

    A step that cannot be captured must fail before the capture, because torch does not recover from
    a broken capture. The dry run also compiles and loads kernels, since CUDA loads no code during a
    capture, and makes tables that are made on first use.
    """

    is_capturing = True

    def __init__(self, capture: Capture, layers: GraphLayers | None, pad: Pad) -> None:
        self._capture, self._layers, self._pad = capture, layers, pad

    def call(
        self, kind: str, function: Callable[..., Tensor], args: tuple[object, ...]
    ) -> Tensor | None:
        if kind == ROUTER_INPUT and _takes_router_input(self._layers, args):
            return None
        if kind not in _BREAKS:
            return function(*args)
        handed, result = _handed_over(kind, args, self._layers, self._pad)
        if result is not None:
            return result
        with self._capture.waits(allowed=True):
            return function(*handed)


class _GraphBreaker:
    """Intercepts opaque calls during a capture; experts and disk rows become graph breaks."""

    is_capturing = True

    def __init__(self, capture: Capture, layers: GraphLayers | None, pad: Pad) -> None:
        self._capture, self._layers, self._pad = capture, layers, pad
        self.segments: list[tuple[Graph, GraphBreak | None]] = []
        self._first: tuple[Callable[[], object], ...] = ()  # of the next break
        self._num_inside = 0  # layers computed inside segments

    def call(
        self, kind: str, function: Callable[..., Tensor], args: tuple[object, ...]
    ) -> Tensor | None:
        if kind == ROUTER_INPUT:
            if not _takes_router_input(self._layers, args):
                self._first += (partial(function, *args),)
            return None
        if kind not in _BREAKS:
            return function(*args)  # captured like everything else
        handed, result = _handed_over(kind, args, self._layers, self._pad)
        if result is not None:
            self._num_inside += 1
            if (self._num_inside - 1) % LAYERS_A_GRAPH == 0:
                self.segments.append((self._capture.end(), None))
                self._capture.begin()
            return result
        result = room_for_rows(*handed) if kind == DISK_ROWS else torch.empty_like(handed[1])
        call = GraphBreak(function, handed, result, self._first)
        self.segments.append((self._capture.end(), call))
        self._first = ()
        self._capture.begin()
        return result


class _PaddedRecorder(Recorder):
    """Records a step that is captured later; calls that may become graph breaks stay opaque."""

    def __init__(self, pad: Pad) -> None:
        super().__init__()
        self._pad = pad

    def call(self, kind: str, function: Callable[..., Tensor], args: tuple[object, ...]) -> Tensor:
        if kind not in (*_BREAKS, ROUTER_INPUT):
            return super().call(kind, function, args)
        padded = _padded(args, self._pad) if kind == EXPERTS else args
        result = Meeting.call(self, kind, function, padded)
        again = partial(opaque, kind, function)
        self._note(again, kind, args, {}, result, has_effects=True)
        return result


def recorded_for_capture(
    step: Callable[[], Tensor], inputs: Sequence[Tensor], fusing: Fusing, pad: Pad
) -> RecordedGraph:
    """Record a step that reads `inputs`; return it as fewer, larger operations.

    Raises `NotRecordableError` for a step that reads a tensor's value in Python.
    """
    recorder = _PaddedRecorder(pad)
    with recorder:
        result = step()
    return RecordedGraph(recorder.recording, result, inputs, fusing=fusing)


def _padded(args: tuple[object, ...], pad: Pad) -> ExpertsArguments:
    layer, hidden, index, weights, functions = cast("ExpertsArguments", args)
    return layer, hidden, pad(index), weights, functions


def _takes_router_input(layers: GraphLayers | None, args: tuple[Any, ...]) -> bool:
    layer, hidden, _ = args
    return layers is not None and layers.take_router_input(layer, hidden)


def _handed_over(
    kind: str, args: tuple[object, ...], layers: GraphLayers | None, pad: Pad
) -> tuple[tuple[Any, ...], Tensor | None]:
    """Return a call's arguments, and its result if `layers` compute it in the segment, else None.

    Without a result, tensors among the returned arguments are contiguous, for a graph break.
    """
    if kind == EXPERTS:
        args = _padded(args, pad)
        result = None if layers is None else layers(*args)
        if result is not None:
            return args, result
    return tuple(x.contiguous() if isinstance(x, Tensor) else x for x in args), None


class CapturedStep:
    """A captured step: graph segments, and the executor's calls between them."""

    def __init__(
        self,
        segments: list[tuple[Graph, GraphBreak | None]],
        result: Tensor,
        around: Callable[[], AbstractContextManager[None]],
        captured: Callable[[], Tensor],
        plain: Callable[[], Tensor],
        save: Save,
    ) -> None:
        """Take segments, each with the call after it, and the tensor that the last segment writes.

        Every run is inside `around()`. `captured` is kept alive: it holds tensors that the segments
        read, such as weights in fp32, while a graph keeps only its own memory. If a run waits too
        long for a disk, the state that `save` saved is restored, and `plain` computes the step.
        """
        self._segments, self._result, self._around = segments, result, around
        self._captured, self._plain, self._save = captured, plain, save

        self.num_graphs = len(segments)

    @property
    def num_segments(self) -> int:
        """How many segments the step has: one more than graph breaks."""
        return 1 + sum(call is not None for _, call in self._segments)

    def run(self) -> Tensor:
        """Queue the step again; return its result, which is valid until the next call."""
        go_back = self._save()
        try:
            with self._around():
                for graph, call in self._segments:
                    graph.replay()
                    if call is not None:
                        call.run()
        except _native.StepSlowError:
            go_back()
            return self._plain()
        return self._result


def new_graphed_step(
    step: Callable[[], Tensor],
    tolerance: float | None,
    make_capture: Callable[[], Capture],
    find_layers: Callable[[], GraphLayers | None] = lambda: None,
    *,
    pad: Pad = lambda index: index,
    executor: Executor | None = None,
    announce: Callable[[], None] = lambda: None,
    make_room: Callable[[], bool] = lambda: False,
    deferring: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    save: Save = lambda: lambda: None,
    record_first: Callable[[], Callable[[], Tensor]] | None = None,
    is_like_trusted: bool = False,
    warns: bool = True,
    why_not: str | None = None,
) -> ReplayedStep:
    """Return a decode step that is captured at its first run; `step` is the model's own code.

    `record_first` runs `step` and returns it as fewer operations, which are captured instead.
    `find_layers` is called at the capture; its result must stay valid as long as the segments.
    `pad` removes the experts of padding tokens. Replays with graph breaks run inside `deferring`:
    work that experts defer runs after the next segment's launch. The other arguments are those of
    `ReplayedStep`.
    """

    def plain() -> Tensor:
        with intercepted(Announced(pad)):
            return step()

    def capture(layers: GraphLayers | None) -> CapturedStep:
        capture = partial(_captured, make_capture=make_capture, layers=layers, pad=pad)
        segments, result, captured = _shortest(step, record_first, capture, warns=warns)
        around = deferring if layers is None else layers.around
        may_repeat = executor is not None and executor.reads_disk
        saves: Save = save if may_repeat else lambda: lambda: None
        return CapturedStep(segments, result, around, captured, plain, saves)

    def capture_one_way() -> CapturedStep:
        layers = find_layers()
        try:
            return capture(layers)
        except (torch.OutOfMemoryError, ModelError):  # the latter: a disk that gave no experts
            raise
        except Exception as error:
            if layers is None or not layers.give_up(error):
                raise
        return capture(find_layers())

    def record() -> tuple[Tensor, CapturedStep]:
        expected = plain().clone()
        go_on = save()  # a capture may do the step several times
        with unheard(executor):
            announce()
            captured = capture_one_way()
        go_on()
        return expected, captured

    return ReplayedStep(
        plain, record, tolerance,
        executor=executor, announce=announce, save=save, make_room=make_room, warns=warns,
        is_like_trusted=is_like_trusted, why_not=why_not,
    )  # fmt: skip


# A step's segments, with what comes after each; the tensor of its result; and what was captured.
Captured = tuple[list[tuple[Graph, GraphBreak | None]], Tensor, Callable[[], Tensor]]


def _shortest(
    step: Callable[[], Tensor],
    record_first: Callable[[], Callable[[], Tensor]] | None,
    capture: Callable[[Callable[[], Tensor]], Captured], *, warns: bool,
) -> Captured:  # fmt: skip
    """Return the capture of `record_first()`, or of `step` if `record_first` is None or fails."""
    if record_first is not None:
        try:
            return capture(record_first())
        except NotRecordableError:
            pass
        except (torch.OutOfMemoryError, ExecutionError, ModelError):
            raise
        except Exception as error:  # Triton's compilers and tools raise what they like
            what = str(error).partition("\n")[0]
            what = f"decode steps are captured with more kernels than need be: {what}"
            if warns:
                warnings.warn(what, TandemWarning, stacklevel=2)
    return capture(step)


def _run_dry(
    step: Callable[[], Tensor], capture: Capture, layers: GraphLayers | None, pad: Pad
) -> None:
    """Run a step as it will be captured; repeat it, up to `_DRY_RUNS` runs, if a disk is slow."""
    for left in reversed(range(_DRY_RUNS)):
        around = contextlib.nullcontext() if layers is None else layers.around()
        dry_run = intercepted(_DryRun(capture, layers, pad))
        try:
            with around, dry_run, capture.waits(allowed=False):
                step()
            return
        except _native.StepSlowError:
            if not left:
                raise


def _captured(
    step: Callable[[], Tensor],
    make_capture: Callable[[], Capture],
    layers: GraphLayers | None,
    pad: Pad,
) -> Captured:
    """Run a step dry, which makes masks, kernels and workspaces, and then capture it."""
    capture = make_capture()
    _run_dry(step, capture, layers, pad)
    breaker = _GraphBreaker(capture, layers, pad)
    with on_capture_stream(capture), intercepted(breaker):
        try:
            capture.begin()
            result = step()
            last = capture.end()
        except BaseException:
            capture.abandon()
            raise
    return [*breaker.segments, (last, None)], result, step

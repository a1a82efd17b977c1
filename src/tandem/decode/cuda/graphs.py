"""A decode step as CUDA graph segments: between the experts of two layers, nothing but a replay.

The model's own code runs once while its work is captured. The experts are graph breaks: there the
capture of a segment ends, and the next begins with a tensor that stands for the experts' result. A
replay runs segment, experts, segment, experts, to the end. Everything lies at addresses that stay:

    inputs (ids, positions, masks, KV cache) -> segment -> hidden, choice, weights (kept)
      -> executor -> copied into the result's tensor -> next segment

A step that cannot be captured, or whose segments give other logits, runs as the model's own code;
`why_not` says why.
"""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.core.errors import TandemWarning
from tandem.hf.opaque_calls import intercepted
from tandem.kernels.torch_private import end_allocation_to_pool

# The first steps let lazily made things (masks, compiled kernels, workspaces) come to be.
_STEPS_BEFORE = 2
_COMPARED_STEPS = 2
# As in `replay`; experts on the GPU and on the CPU round differently, and plans change.
_TOLERANCES = {torch.float32: 1e-2, torch.bfloat16: 0.1, torch.float16: 0.05}


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Queue it again, on the same memory."""


class Capture(Protocol):
    """Turns work into graphs that share their memory; made again for each step that is captured."""

    def waits(self, *, allowed: bool) -> AbstractContextManager[None]:
        """Raise `RuntimeError` inside where work makes the host wait, unless that is allowed."""

    def begin(self) -> None:
        """Begin a piece: from now on work is noted and not done."""

    def end(self) -> Graph:
        """End the piece."""

    def abandon(self) -> None:
        """Give up the piece that has begun, if any: from now on work is done again."""


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
        its allocator and its generator: the one would go on giving memory of the piece's pool, the
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
    gc.disable()  # what Python frees while a piece is captured would be captured too
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


class Cut(NamedTuple):
    """A call of the executor between two pieces."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    result: Tensor


# Returns a router's choice (n_tokens, top_k) with padding for the rows that have no token.
Pad = Callable[[Tensor], Tensor]
# Computes a layer as part of a piece, given the executor's arguments; None: it must be cut.
Uncut = Callable[..., Tensor | None]


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

    def __init__(self, capture: Capture, uncut: Uncut | None, pad: Pad) -> None:
        self._capture, self._uncut, self._pad = capture, uncut, pad

    def call(self, kind: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if kind != "experts":
            return function(*args)
        args = _padded(args, self._pad)
        result = None if self._uncut is None else self._uncut(*args)
        if result is not None:
            return result
        with self._capture.waits(allowed=True):
            return function(*_handed_over(args))


class _Cutter:
    """Meets the model's opaque calls while it is captured, and cuts at its experts."""

    is_capturing = True

    def __init__(self, capture: Capture, uncut: Uncut | None, pad: Pad) -> None:
        self._capture, self._uncut, self._pad = capture, uncut, pad
        self.pieces: list[tuple[Graph, Cut | None]] = []

    def call(self, kind: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if kind != "experts":
            return function(*args)  # captured like everything else
        args = _padded(args, self._pad)
        if self._uncut is not None:
            result = self._uncut(*args)
            if result is not None:
                return result
        args = _handed_over(args)
        result = torch.empty_like(args[1])
        self.pieces.append((self._capture.end(), Cut(function, args, result)))
        self._capture.begin()
        return result


def _padded(args: tuple[Any, ...], pad: Pad) -> tuple[Any, ...]:
    layer, hidden, index, weights, functions = args
    return layer, hidden, pad(index), weights, functions


def _handed_over(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an executor's arguments as a piece hands them over: dense and each by itself."""
    layer, hidden, index, weights, functions = args
    return layer, hidden.contiguous(), index.contiguous(), weights.contiguous(), functions


class GraphedStep:
    """One decode step for fixed tensors: the model's own code, or captured pieces."""

    def __init__(
        self,
        step: Callable[[], Tensor],
        dtype: torch.dtype,
        make_capture: Callable[[], Capture] | None,
        find_uncut: Callable[[], Uncut | None] = lambda: None,
        *,
        pad: Pad = lambda index: index,
        make_room: Callable[[], bool] = lambda: False,
        unheard: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        deferring: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Take the model's own step; it may be repeated. Without a capture it stays as it is.

        `find_uncut` is asked when the step is captured: what it finds holds as long as the pieces.
        `make_room` frees memory of the GPU if it can, for a capture that had too little. What
        is done to capture and to compare is done inside `unheard`: no request is answered. Replays
        run inside `deferring`: what experts leave to later is done behind the next replay's launch.
        """
        self._step, self._find_uncut, self._pad = step, find_uncut, pad
        self._make_room, self._unheard, self._deferring = make_room, unheard, deferring
        self._tolerance = _TOLERANCES.get(dtype)
        self._make_capture = make_capture
        self._pieces: list[tuple[Graph, Cut | None]] = []
        self._result: Tensor | None = None
        self._num_steps = 0
        self._num_equal = 0
        self.why_not: str | None = None
        if make_capture is None:
            self.why_not = "replay is disabled (has_replay=False)"
        elif self._tolerance is None:
            self.why_not = f"the model is {dtype}"

    @property
    def is_replaying(self) -> bool:
        """Tell whether steps come from captured pieces."""
        return self._result is not None and self._num_equal >= _COMPARED_STEPS

    @property
    def num_pieces(self) -> int:
        """Pieces of the step; 0 while it is not captured."""
        return len(self._pieces)

    def __call__(self) -> Tensor:
        """Do the step; return what it returns. Valid until the next call."""
        if self.is_replaying:
            return self._replay()
        self._num_steps += 1
        with intercepted(_Padding(self._pad)):
            expected = self._step()
        if self.why_not is None and self._num_steps > _STEPS_BEFORE:
            expected = expected.clone()
            self._attempt(expected)
        return expected

    def _attempt(self, expected: Tensor) -> None:
        """Capture the step if it is not yet, replay it and compare."""
        try:
            with self._unheard():
                if self._result is None:
                    self._capture_step()
                difference = (self._replay().float() - expected.float()).norm()
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            if isinstance(error, torch.OutOfMemoryError) and self._make_room():
                self._pieces, self._result = [], None  # the next step tries again
                return
            self._give_up(str(error).partition("\n")[0] or type(error).__name__)
            return
        assert self._tolerance is not None
        if bool(difference <= self._tolerance * expected.float().norm()):
            self._num_equal += 1
        else:
            self._give_up("captured pieces give other logits")

    def _capture_step(self) -> None:
        assert self._make_capture is not None
        uncut, capture = self._find_uncut(), self._make_capture()
        with intercepted(_DryRun(capture, uncut, self._pad)), capture.waits(allowed=False):
            self._step()
        cutter = _Cutter(capture, uncut, self._pad)
        with on_capture_stream(capture), intercepted(cutter):
            try:
                capture.begin()
                result = self._step()
                last = capture.end()
            except BaseException:
                capture.abandon()
                raise
        self._pieces = [*cutter.pieces, (last, None)]
        self._result = result

    def _replay(self) -> Tensor:
        with self._deferring():
            for graph, cut in self._pieces:
                graph.replay()
                if cut is not None:
                    cut.result.copy_(cut.function(*cut.args))
        assert self._result is not None
        return self._result

    def _give_up(self, why: str) -> None:
        self._pieces, self._result, self.why_not = [], None, why
        warnings.warn(
            f"decode steps run as the model's own code, slower: {why}", TandemWarning, stacklevel=2
        )

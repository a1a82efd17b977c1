"""CUDA graphs: captures the work queued on a stream, and cleans up after a broken capture."""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from tandem.devices.cuda.streams import CudaStreams, Stream
from tandem.kernels.torch_private import end_allocation_to_pool


class Graph(Protocol):
    """Captured work, which can be queued again."""

    def replay(self) -> None:
        """Queue the work again, on the same memory."""


class Capture(Protocol):
    """Captures a step as graphs that share a memory pool: one graph for each of its segments.

    Each step to be captured needs its own object. Segments must be captured one after another.
    """

    def waits(self, *, allowed: bool) -> AbstractContextManager[None]:
        """Return a context manager in which a wait of the host is an error, unless `allowed`.

        The error is a `RuntimeError`, raised where the host would wait.
        """

    def begin(self) -> None:
        """Begin a segment: from now on work is captured, not executed."""

    def end(self) -> Graph:
        """End the segment; return its graph."""

    def abandon(self) -> None:
        """Abandon the current segment, if any: from now on work is executed again."""


class CudaCapture:
    """Captures CUDA graphs on a stream of their own, with memory from one pool."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """Take a GPU; `begin` and `end` must be called inside `on_capture_stream`.

        Captures that share a `stream` share the workspaces that matrix products keep for it.
        """
        self.stream = stream or torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextlib.contextmanager
    def waits(self, *, allowed: bool) -> Iterator[None]:
        """Make torch raise an error where the `with` body waits for the GPU, unless `allowed`."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns once that it does not find every wait
            torch.cuda.set_sync_debug_mode("default" if allowed else "error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def begin(self) -> None:
        """Begin a capture; other threads may keep calling CUDA."""
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Graph:
        """End the capture; return its graph."""
        assert self._graph is not None
        self._graph.capture_end()
        graph, self._graph = self._graph, None
        return graph

    def abandon(self) -> None:
        """Clean up after a broken capture: the stream, the allocator and the random generator.

        If CUDA calls a capture invalid, torch (as of 2.11) raises before it notifies its allocator
        and its generator: the allocator would keep allocating from the graph's pool, and the
        generator would refuse to draw.
        """
        graph, self._graph = self._graph, None
        if graph is None:
            return
        device = self.stream.device
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        with contextlib.suppress(RuntimeError):  # it has ended already, or never began
            end_allocation_to_pool(device.index, self._pool)
        generator = torch.cuda.default_generators[device.index]
        with contextlib.suppress(RuntimeError):
            generator.graphsafe_set_state(generator.clone_state())
        with contextlib.suppress(RuntimeError):
            graph.reset()


@contextlib.contextmanager
def on_capture_stream(capture: Capture) -> Iterator[None]:
    """Make a capture's stream current in the `with` body, with Python's garbage collection off.

    The stream that was current before is kept in order: its earlier work precedes the body's work,
    and its later work follows it.
    """
    if not isinstance(capture, CudaCapture):
        yield
        return
    had_gc = gc.isenabled()
    gc.collect()
    gc.disable()  # memory that Python frees during a capture would be captured, too
    try:
        torch.cuda.synchronize(capture.stream.device)
        torch.cuda.empty_cache()  # a capture cannot free what the allocator keeps for later
        before = torch.cuda.current_stream(capture.stream.device)
        capture.stream.wait_stream(before)
        with torch.cuda.stream(capture.stream):
            yield
        before.wait_stream(capture.stream)
    finally:
        if had_gc:
            gc.enable()


def captured_work(work: Callable[[], None], capture: Capture, streams: CudaStreams) -> Graph:
    """Capture all that `work` queues on the compute stream; return the graph."""
    graphs = list[Graph]()

    def queue() -> None:
        with on_capture_stream(capture):
            try:
                capture.begin()
                work()
                graphs.append(capture.end())
            except BaseException:
                capture.abandon()
                raise

    streams.run(Stream.COMPUTE, queue)
    return graphs[0]

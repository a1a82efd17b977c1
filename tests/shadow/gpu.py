"""A simulated GPU: its memory, streams, captures and the thread that runs launched work.

torch's own operations run immediately on the calling thread, after all launched work. Kernels and
graphs run on the GPU's thread, so that they can wait for the host. Each operation is checked when
it is queued: where its memory is, what it waits for, what precedes it (`order`). A fault is raised,
and also stored, because some code tries operations and continues.
"""

import bisect
import contextlib
import queue
import random
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.shadow.order import HOST, Clock, Memory, Moment, Order

_LIMIT_SECONDS = 120.0
# Uninitialised memory is NaN in every format of floats, up to this size.
_MOST_POISONED = 1 << 24
_ROUND = 512  # bytes: what an allocation is rounded up to


class ShadowFaultError(AssertionError):
    """An error that would occur on a GPU."""


class ShadowGpu:
    """One GPU, `cuda:0`."""

    def __init__(self, total_bytes: int = 8 << 30, seed: int = 0) -> None:
        """Create a GPU with this much memory; `seed` decides how late events complete."""
        self.total_bytes = self.limit_bytes = total_bytes
        self.fraction = 1.0
        self.random = random.Random(seed)
        self.faults: list[str] = []
        self.waits: list[str] = []
        self.launched: list[str] = []
        self.order = Order(self.fault)
        self.taken_bytes = self.peak_bytes = 0
        self.sync_mode = 0
        self.capture: Any = None  # the capture that has begun, if any
        self.worker = Worker()
        self.running: Moment | None = None  # of what the GPU's thread does now
        self._memories = weakref.WeakValueDictionary[int, Memory]()
        self._pinned: list[tuple[int, Memory, Any]] = []  # by address, with what keeps it
        self._local = threading.local()
        self._num_streams = 1

    # Streams.

    @property
    def stream(self) -> Any:
        """The calling thread's current stream; None is the default stream."""
        return getattr(self._local, "stream", None)

    @stream.setter
    def stream(self, stream: Any) -> None:
        self._local.stream = stream

    @property
    def stream_number(self) -> int:
        return 0 if self.stream is None else int(self.stream.number)

    def new_stream_number(self) -> int:
        self._num_streams += 1
        return self._num_streams - 1

    def begin_work(self, what: str) -> Moment:
        """Begin to queue work on the current stream; raises if that is not allowed."""
        number, capture = self.stream_number, self.capture
        if capture is not None:
            if capture.thread != threading.get_ident():
                self.fault(f"{what} is launched while another thread captures")
            elif number != capture.stream_number:
                self.fault(f"{what} on stream {number} in a capture of {capture.stream_number}")
        return self.order.next(number)

    @property
    def is_capturing(self) -> bool:
        """Whether the calling thread captures a graph."""
        return self.capture is not None and self.capture.thread == threading.get_ident()

    # Waits and faults.

    def fault(self, text: str) -> None:
        """Raise a fault that names the place in Tandem's code."""
        text = f"{text} ({where()})"
        self.faults.append(text)
        raise ShadowFaultError(text)

    def wait(self, what: str, clock: Clock | None = None) -> None:
        """Let the host wait for the current stream; raises where torch would not allow it."""
        if self.is_capturing:
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing ({what})"
            )
        self.waits.append(f"{what} ({where()})")
        if self.sync_mode == 2:  # "error"
            raise RuntimeError(f"called a synchronizing CUDA operation ({what}, {where()})")
        self.worker.join()
        self.order.learn(HOST, self.order.now(self.stream_number) if clock is None else clock)

    def has_waited(self) -> None:
        """Record that the host has waited, so what it waited for is done."""
        self.order.learn(HOST, self.order.now(self.stream_number))

    # Memory.

    def memory_of(self, inner: Tensor) -> Memory:
        """Return the device memory of a tensor's values; new memory is counted."""
        storage = inner.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        found = self._memories.get(start)
        if found is None:
            self.take(size)
            found = Memory(start, size, self.stream_number, self._give_back)
            found.pool = self.capture
            if size:
                self._memories[start] = found
        return found

    def take(self, num_bytes: int) -> None:
        """Count allocated memory; raises torch's error beyond the limit."""
        size = -(-num_bytes // _ROUND) * _ROUND
        if self.taken_bytes + size > self.total_bytes * self.fraction:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {num_bytes} bytes."
            )
        self.taken_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.taken_bytes)

    def _give_back(self, memory: Memory) -> None:
        self.taken_bytes -= -(-memory.num_bytes // _ROUND) * _ROUND
        with contextlib.suppress(ShadowFaultError):  # nothing can be raised here; it is kept
            self.order.end(memory)

    def find(self, address: int) -> Memory | None:
        """Return the device or pinned memory that contains an address."""
        pinned = self.pinned_at(address)
        if pinned is not None:
            return pinned
        for reference in self._memories.valuerefs():  # a copy, while other threads take memory
            memory = reference()
            if memory is not None and memory.start <= address < memory.start + memory.num_bytes:
                return memory
        return None

    def poison(self, inner: Tensor) -> None:
        """Fill new memory with values that reveal uninitialised reads."""
        if 0 < inner.nbytes <= _MOST_POISONED and inner.is_contiguous():
            inner.view(-1).view(torch.uint8).fill_(0xFF)

    # Pinned memory.

    def pin(self, address: int, num_bytes: int, owner: Any = None) -> bool:
        """Pin a range; return False if it overlaps a pinned one."""
        if self.is_capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if any(a < address + num_bytes and address < a + m.num_bytes for a, m, _ in self._pinned):
            return False
        memory = Memory(address, num_bytes, HOST, None)
        bisect.insort(self._pinned, (address, memory, owner), key=lambda each: each[0])
        return True

    def unpin(self, address: int) -> None:
        self._pinned = [each for each in self._pinned if each[0] != address]

    @property
    def registered_bytes(self) -> int:
        """The bytes that were pinned in place and not yet unpinned."""
        return sum(memory.num_bytes for _, memory, owner in self._pinned if owner is None)

    def pinned_at(self, address: int) -> Memory | None:
        """Return the pinned memory that contains an address."""
        place = bisect.bisect_right(self._pinned, address, key=lambda each: each[0]) - 1
        if place >= 0:
            start, memory, _ = self._pinned[place]
            if address < start + memory.num_bytes:
                return memory
        return None

    def use(self, tensor: Tensor, moment: Moment, what: str, *, writes: bool) -> None:
        """Record that work reads or writes a tensor in device or pinned memory."""
        if tensor.numel() == 0:
            return
        memory = self._memories.get(tensor.untyped_storage().data_ptr())
        low, high = extent(tensor)
        memory = memory or self.pinned_at(low)
        if memory is not None:
            self.order.use(memory, low, high, moment, f"{what} at {where()}", writes=writes)

    def queue(self, work: Callable[[], None], moment: Moment) -> None:
        """Queue work for the GPU's thread."""

        def run() -> None:
            self.running = moment
            work()

        self.worker.put(run)

    def running_uses(self, tensor: Tensor, what: str) -> None:
        """Record that the running work reads memory that it found by address."""
        memory = self.find(tensor.data_ptr())
        if memory is None:
            self.fault(f"{what} reads memory at an address that is no slot's")
        elif self.running is not None and memory.home != HOST:
            self.order.use(memory, *extent(tensor), self.running, what, writes=False)

    def host_uses(self, tensor: Tensor, what: str, *, writes: bool) -> None:
        """Record that the host reads or writes one of its tensors, if it is pinned."""
        if self._pinned and tensor.numel() and self.pinned_at(tensor.data_ptr()) is not None:
            self.use(tensor, self.order.next(HOST), what, writes=writes)


class Worker:
    """The thread that runs launched work in order."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self.num_queued = self.num_done = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="shadow gpu", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        self.num_queued += 1
        self._works.put(work)

    def join(self, ticket: int | None = None) -> None:
        """Wait for all work, or for the work up to `ticket`; raises what one of them raised."""
        if threading.current_thread() is self._thread:
            return
        target = self.num_queued if ticket is None else ticket
        with self._changed:
            if not self._changed.wait_for(lambda: self.num_done >= target, _LIMIT_SECONDS):
                raise ShadowFaultError("the GPU does not come to an end")
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        self._works.put(None)
        self._thread.join()

    def _run(self) -> None:
        with torch.inference_mode():
            while (work := self._works.get()) is not None:
                try:
                    work()
                except BaseException as error:
                    self._error = error
                with self._changed:
                    self.num_done += 1
                    self._changed.notify_all()


def extent(tensor: Tensor) -> tuple[int, int]:
    """Return the address range of a tensor's values: first, and one past the last."""
    low = tensor.data_ptr()
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (steps + 1) * tensor.element_size()


def where() -> str:
    """Return the innermost place in Tandem's code, otherwise in a test's."""
    frames = [
        frame
        for frame in traceback.walk_stack(None)
        if "/tandem/" in frame[0].f_code.co_filename
        or (
            "/tests/" in frame[0].f_code.co_filename
            and "/tests/shadow/" not in frame[0].f_code.co_filename
        )
    ]
    for frame, line in frames:
        return f"{frame.f_code.co_filename.rpartition('/src/')[2]}:{line}"
    return "outside"

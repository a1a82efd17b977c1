"""A simulated GPU that runs work as late as allowed: the CPU twin of `CudaStreams`.

Queued work is only recorded. It runs when a thread waits, in a random order among those that
streams and events allow. Nothing protects "pinned" host memory that is still being read, so an
executor that forgets an event computes with wrong bytes.
"""

import random
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.devices.cuda.streams import CudaStreams, Event, HostCopy, Stream, Work
from tandem.experts.cache.sizing import DeviceMemory, OutOfDeviceMemoryError


class LazyEvent:
    """A position in a stream's order."""

    def __init__(self, streams: "LazyStreams", stream: Stream) -> None:
        self._streams, self.stream = streams, stream
        self.is_done = False

    def query(self) -> bool:
        self._streams.maybe_run()
        return self.is_done

    def synchronize(self) -> None:
        self._streams.num_waits += 1
        self._streams.require_whole()
        while not self.is_done:
            self._streams.run_one()


class _Step(NamedTuple):
    """One entry of a stream: work, an event to wait for, or an event to set."""

    work: Work | None = None
    wait: LazyEvent | None = None
    done: LazyEvent | None = None


class LazyStreams(CudaStreams):
    """Streams that run their work late."""

    name = "lazy"
    device = torch.device("cpu")

    def __init__(
        self, seed: int = 0, total_bytes: int = 1 << 30, *, is_eager: bool = False
    ) -> None:
        """Create the streams; with `is_eager` work runs at once, for models without streams."""
        self._is_eager = is_eager
        self.random = random.Random(seed)
        self.num_waits = 0
        self.pauses: list[float] = []
        self.num_copies: list[int] = []  # of each call
        self.may_pin = True
        self.l2_bytes = 0
        self.pinned_bytes = self.num_pinned = 0
        self.broken: RuntimeError | None = None
        self._queues: dict[Stream, deque[_Step]] = {stream: deque() for stream in Stream}
        self._limit = self._total = total_bytes
        self._taken: list[tuple[int, Tensor]] = []

    def run(self, stream: Stream, work: Work) -> None:
        self._queues[stream].append(_Step(work=work))
        if self._is_eager:
            self.synchronize()

    def copy(self, stream: Stream, copies: Sequence[HostCopy]) -> None:
        shuffled = self.random.sample(copies, len(copies))
        self.num_copies.append(len(copies))

        def work() -> None:
            for target, source in shuffled:
                target.copy_(source)

        self.run(stream, work)

    def record(self, stream: Stream, *, is_timed: bool = False) -> LazyEvent:
        event = LazyEvent(self, stream)
        self._queues[stream].append(_Step(done=event))
        return event

    def between(self, first: Event, last: Event) -> float:
        assert isinstance(first, LazyEvent)
        assert isinstance(last, LazyEvent)
        assert first.is_done, "its time is not known yet"
        assert last.is_done, "its time is not known yet"
        return 1e-3

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, LazyEvent)
        self._queues[stream].append(_Step(wait=event))

    def pause(self, stream: Stream, seconds: float) -> None:
        self.pauses.append(seconds)

    def seconds(self, stream: Stream, work: Work) -> float:
        self.synchronize()
        work()
        return 1e-3

    def synchronize(self) -> None:
        self.require_whole()
        while any(self._queues.values()):
            self.run_one()

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self._limit, self._limit)

    def limit(self, num_bytes: int | None) -> None:
        self._limit = self._total if num_bytes is None else num_bytes

    def cache_bytes(self) -> int:
        return self.l2_bytes

    def taken_bytes(self) -> int:
        return 0

    def peak_bytes(self, work: Work) -> int:
        work()
        return 1 << 20

    def empty(self, num_bytes: int) -> Tensor:
        if num_bytes > self._limit:
            raise OutOfDeviceMemoryError("no memory")
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)  # NaN in every format of floats

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)

    def pin(self, memory: Tensor) -> bool:
        self.pinned_bytes += memory.nbytes if self.may_pin else 0
        self.num_pinned += self.may_pin
        return self.may_pin

    def unpin(self, memory: Tensor) -> None:
        self.pinned_bytes -= memory.nbytes

    def require_whole(self) -> None:
        """Raise at every wait once an error has broken the device, as CUDA does."""
        if self.broken is not None:
            raise self.broken

    def maybe_run(self) -> None:
        """Run some queued work, as a GPU does while the host is busy."""
        for _ in range(self.random.randrange(4)):
            if any(self._queues.values()):
                self.run_one()

    def run_one(self) -> None:
        """Run the next entry of a random stream that does not have to wait."""
        ready = [
            stream
            for stream, steps in self._queues.items()
            if steps and (steps[0].wait is None or steps[0].wait.is_done)
        ]
        assert ready, "the streams wait for each other"
        step = self._queues[self.random.choice(ready)].popleft()
        if step.work is not None:
            step.work()
        if step.done is not None:
            step.done.is_done = True

"""The interface to CUDA, in a dozen calls: streams, events between them, memory.

Callers of this interface decide the order of copies and computation, so that the order can be
tested without a GPU: a CPU twin runs the streams' work late and in any order that the events allow
(`tests/experts/lazy_streams.py`).
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.devices.cuda.batch_copy import (
    AddressRanges,
    CopyEntry,
    find_batch_copy,
    is_worth_a_batch,
)
from tandem.experts.cache.sizing import DeviceMemory, OutOfDeviceMemoryError
from tandem.kernels.torch_private import spin_gpu

Work = Callable[[], None]

# Timed once to find the length of a cycle: about 5 ms.
_PROBE_CYCLES = 10_000_000
# Timed work queues behind a pause of this length, so that the time to launch it does not count.
_TIMING_PAUSE_SECONDS = 3e-4


class Stream(Enum):
    """The CUDA streams in use. Streams wait for each other only through events."""

    COMPUTE = "compute"
    """The stream that runs the model."""
    FETCH = "fetch"
    """Copies that a layer waits for."""
    AHEAD = "ahead"
    """Copies for later layers, at lower priority."""


class HostCopy(NamedTuple):
    """A copy of bytes between host and device, either way: both tensors are (n,) uint8."""

    target: Tensor
    source: Tensor


class Event(Protocol):
    """A position in the order of a stream's work."""

    def query(self) -> bool:
        """Tell without waiting whether everything before the event is done."""

    def synchronize(self) -> None:
        """Wait until everything before the event is done."""


def memory_of(device: torch.device) -> DeviceMemory:
    """Return a GPU's memory; unused memory that torch's allocator holds counts as free."""
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return DeviceMemory(total, free + held)


class CudaStreams:
    """The streams, events and memory of one GPU, which need not be torch's current device."""

    def __init__(self, index: int = 0) -> None:
        """Create the streams of GPU `index`; `require_cuda` must have been called before."""
        self.device = torch.device("cuda", index)
        self._batch_copy, self._pinned = find_batch_copy(), AddressRanges()
        self._fraction_before: float | None = None
        self.name = torch.cuda.get_device_name(self.device)
        self._streams = {
            Stream.FETCH: torch.cuda.Stream(self.device, priority=-1),
            Stream.AHEAD: torch.cuda.Stream(self.device, priority=0),
        }

    def run(self, stream: Stream, work: Work) -> None:
        """Call `work` with `stream` as the current stream, on which it queues and allocates."""
        if stream is Stream.COMPUTE:  # the current stream of this GPU
            with torch.cuda.device(self.device):
                work()
            return
        with torch.cuda.stream(self._streams[stream]):
            work()

    def copy(self, stream: Stream, copies: Sequence[HostCopy]) -> None:
        """Queue copies from or to the host on a stream; they may run in any order. Never waits.

        One driver call queues all copies if that pays and `pin` has pinned all host memory.
        """
        if stream is not Stream.COMPUTE:
            entries = [
                CopyEntry(target.data_ptr(), source.data_ptr(), source.nbytes)
                for target, source in copies
            ]
            if is_worth_a_batch(entries) and self._copy_in_one_call(stream, entries):
                return

        def one_by_one() -> None:
            for target, source in copies:
                target.copy_(source, non_blocking=True)

        self.run(stream, one_by_one)

    def _copy_in_one_call(self, stream: Stream, entries: Sequence[CopyEntry]) -> bool:
        """Queue copies by one driver call; False if that is not possible, and nothing is queued."""
        if self._batch_copy is None or not all(map(self._is_of_pinned_memory, entries)):
            return False
        with torch.cuda.device(self.device):  # the driver needs its context current
            code = self._batch_copy(entries, self._cuda_stream(stream).cuda_stream)
        if code != 0:  # from now on copies go one by one
            self._batch_copy = None
        return code == 0

    def _is_of_pinned_memory(self, entry: CopyEntry) -> bool:
        """Tell whether a copy reads or writes memory that `pin` has pinned.

        torch's `is_pinned` looks at the begin of a tensor's storage, which may lie before the
        pinned part.
        """
        return any(
            self._pinned.holds(address, entry.num_bytes) for address in (entry.source, entry.target)
        )

    def record(self, stream: Stream, *, is_timed: bool = False) -> Event:
        """Return an event after all work queued on a stream so far; `between` needs `is_timed`."""
        event: Any = torch.cuda.Event(enable_timing=is_timed)
        event.record(self._cuda_stream(stream))
        return event  # type: ignore[no-any-return]

    def between(self, first: Event, last: Event) -> float:
        """Return the seconds between two timed events; both must be done."""
        assert isinstance(first, torch.cuda.Event)
        assert isinstance(last, torch.cuda.Event)
        return float(first.elapsed_time(last)) / 1e3

    def wait(self, stream: Stream, event: Event) -> None:
        """Make a stream wait for an event; returns at once."""
        self._cuda_stream(stream).wait_event(event)  # type: ignore[arg-type]

    def pause(self, stream: Stream, seconds: float) -> None:
        """Keep a stream busy for `seconds` with one spinning GPU thread; returns at once."""
        cycles = int(seconds * self._cycles_per_second)
        self.run(stream, lambda: spin_gpu(cycles))

    def seconds(self, stream: Stream, work: Work) -> float:
        """Return the GPU's seconds for `work` on a stream, without launches; waits for the work."""
        self.pause(stream, _TIMING_PAUSE_SECONDS)
        first = self.record(stream, is_timed=True)
        self.run(stream, work)
        last = self.record(stream, is_timed=True)
        last.synchronize()
        return self.between(first, last)

    def synchronize(self) -> None:
        """Wait for all streams; raises their errors."""
        torch.cuda.synchronize(self.device)

    def memory(self) -> DeviceMemory:
        """Return the GPU's total and free memory."""
        return memory_of(self.device)

    def limit(self, num_bytes: int | None) -> None:
        """Limit this process's device memory from now on; None lifts the limit."""
        if num_bytes is None:
            if self._fraction_before is not None:
                torch.cuda.set_per_process_memory_fraction(self._fraction_before, self.device)
                self._fraction_before = None
            return
        if self._fraction_before is None:
            self._fraction_before = torch.cuda.get_per_process_memory_fraction(self.device)
        total = torch.cuda.mem_get_info(self.device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), self.device)

    def cache_bytes(self) -> int:
        """Return the size of the GPU's L2 cache."""
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def taken_bytes(self) -> int:
        """Return the bytes of device memory that this process has allocated."""
        return torch.cuda.memory_allocated(self.device)

    def peak_bytes(self, work: Work) -> int:
        """Return the peak memory of `work`, beyond the bytes allocated before; waits for `work`."""
        self.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before

    def empty(self, num_bytes: int) -> Tensor:
        """Return device memory (num_bytes,) uint8; raises `OutOfDeviceMemoryError`."""
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemoryError(str(error).partition("\n")[0]) from error

    def pinned(self, num_bytes: int) -> Tensor:
        """Return pinned host memory (num_bytes,) uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")

    def pin(self, memory: Tensor) -> bool:
        """Pin existing host memory; False if the system refuses."""
        code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(code) == 0:
            self._pinned.add(memory.data_ptr(), memory.nbytes)
            return True
        # The driver keeps the error until it is read. Otherwise torch would raise it later.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device)
        return False

    def unpin(self, memory: Tensor) -> None:
        """Undo `pin`."""
        self._pinned.remove(memory.data_ptr())
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def _cuda_stream(self, stream: Stream) -> torch.cuda.Stream:
        return self._streams.get(stream) or torch.cuda.current_stream(self.device)

    @functools.cached_property
    def _cycles_per_second(self) -> float:
        with torch.cuda.device(self.device):
            spin_gpu(_PROBE_CYCLES)  # until the clock rate has settled
            first = self.record(Stream.COMPUTE, is_timed=True)
            spin_gpu(_PROBE_CYCLES)
            last = self.record(Stream.COMPUTE, is_timed=True)
        last.synchronize()
        return _PROBE_CYCLES / self.between(first, last)

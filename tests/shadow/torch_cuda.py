"""`torch.cuda` of the shadow device: streams, events, memory, driver registrations."""

import contextlib
import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from tests.shadow.captures import ShadowGraph, launch
from tests.shadow.gpu import ShadowGpu
from tests.shadow.order import HOST, Clock
from tests.shadow.tensor import CUDA, present

_MODES = ("default", "warn", "error")
# An event that the host does not know to have passed reports so once in this many queries.
_LOOKS = 3


class ShadowEvent:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self.is_timed = enable_timing
        self._clock: Clock | None = None
        self._ticket = 0
        self.seconds = 0.0

    def record(self, stream: Any = None) -> None:
        gpu = present()
        if gpu.is_capturing and self.is_timed:
            gpu.fault("a timed event is recorded in a capture")
        number = gpu.stream_number if stream is None else stream.number
        gpu.order.next(number)
        self._clock, self._ticket = gpu.order.now(number), gpu.worker.num_queued
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        """Return whether it has passed: rarely, unless the host knows it, as on a busy GPU."""
        gpu = present()
        if self._clock is None:
            return True
        known = gpu.order.now(HOST)
        if all(known.get(actor, 0) >= tick for actor, tick in self._clock.items()):
            return gpu.worker.num_done >= self._ticket
        if gpu.worker.num_done < self._ticket or gpu.random.randrange(_LOOKS):
            return False
        gpu.order.learn(HOST, self._clock)
        return True

    def synchronize(self) -> None:
        gpu = present()
        if gpu.is_capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        gpu.worker.join(self._ticket)
        if self._clock is not None:
            gpu.order.learn(HOST, self._clock)

    def wait(self, stream: Any = None) -> None:
        gpu = present()
        if self._clock is not None:
            gpu.order.learn(gpu.stream_number if stream is None else stream.number, self._clock)

    def elapsed_time(self, other: "ShadowEvent") -> float:
        if not (self.is_timed and other.is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        known = present().order.now(HOST)
        for event in (self, other):
            clock = event._clock or {}
            if any(known.get(actor, 0) < tick for actor, tick in clock.items()):
                raise RuntimeError("CUDA error: device not ready")
        return max(1e-3, (other.seconds - self.seconds) * 1e3)


class ShadowStream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.priority = CUDA, priority
        self.number = present().new_stream_number()

    @property
    def cuda_stream(self) -> int:
        return 0x1000 * self.number

    def wait_event(self, event: ShadowEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: "ShadowStream") -> None:
        order = present().order
        order.learn(self.number, order.now(stream.number))

    def record_event(self, event: ShadowEvent | None = None) -> ShadowEvent:
        event = event or ShadowEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        present().wait("Stream.synchronize", present().order.now(self.number))

    def query(self) -> bool:
        return self.record_event().query()


class _DefaultStream(ShadowStream):
    def __init__(self) -> None:
        self.device, self.priority, self.number = CUDA, 0, 0


_DEFAULT = _DefaultStream()


@contextlib.contextmanager
def _on_stream(stream: ShadowStream | None) -> Iterator[None]:
    gpu = present()
    before = gpu.stream
    gpu.stream = before if stream is None else None if stream is _DEFAULT else stream
    try:
        yield
    finally:
        gpu.stream = before


def _synchronize(device: Any = None) -> None:
    gpu = present()
    if gpu.is_capturing:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
    gpu.worker.join()
    for number in range(gpu._num_streams):
        gpu.order.learn(HOST, gpu.order.now(number))


class _Runtime:
    """Stands for `torch.cuda.cudart()`."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        return 0 if present().pin(address, num_bytes) else 712  # already registered

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        present().unpin(address)
        return 0


def replacements(gpu: ShadowGpu, capability: tuple[int, int]) -> dict[str, Any]:
    """Return the replacements for names in `torch.cuda`."""
    properties = SimpleNamespace(
        name="shadow", major=capability[0], minor=capability[1], multi_processor_count=1,
        total_memory=gpu.total_bytes, L2_cache_size=1 << 16, warp_size=32,
    )  # fmt: skip

    def set_sync_debug_mode(mode: int | str) -> None:
        gpu.sync_mode = _MODES.index(mode) if isinstance(mode, str) else mode

    def set_fraction(fraction: float, device: Any = None) -> None:
        gpu.fraction = fraction

    def reset_peak(device: Any = None) -> None:
        gpu.peak_bytes = gpu.taken_bytes

    def sleep(cycles: int) -> None:
        launch("a pause", lambda: None, [])

    pools = itertools.count(1)
    return {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        "get_arch_list": lambda: ["sm_75", "sm_80", "sm_86", "sm_90", "sm_120"],
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda *_: True,
        "mem_get_info": lambda device=None: (gpu.total_bytes - gpu.taken_bytes, gpu.total_bytes),
        "memory_allocated": lambda device=None: gpu.taken_bytes,
        "memory_reserved": lambda device=None: gpu.taken_bytes,
        "max_memory_allocated": lambda device=None: gpu.peak_bytes,
        "max_memory_reserved": lambda device=None: gpu.peak_bytes,
        "reset_peak_memory_stats": reset_peak,
        "empty_cache": lambda: None,
        "synchronize": _synchronize,
        "Stream": ShadowStream,
        "Event": ShadowEvent,
        "CUDAGraph": ShadowGraph,
        "stream": _on_stream,
        "current_stream": lambda device=None: gpu.stream or _DEFAULT,
        "default_stream": lambda device=None: _DEFAULT,
        "graph_pool_handle": lambda: (next(pools), 0),
        "is_current_stream_capturing": lambda: gpu.is_capturing,
        "get_sync_debug_mode": lambda: gpu.sync_mode,
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_per_process_memory_fraction": lambda device=None: gpu.fraction,
        "set_per_process_memory_fraction": set_fraction,
        "cudart": _Runtime,
        "default_generators": (torch.Generator(),),
        "_sleep": sleep,
    }

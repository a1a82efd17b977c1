"""A GPU as a device of the hybrid runtime: its memory, and batches on the model's own stream.

All work is queued, in the order that `experts.execution.device` describes. A layer waits only in
`download`, for the router's choice. Host memory that queued copies read (rows, tables) is written
again only after the next `download`, which follows these copies on the same stream.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.core.units import format_bytes
from tandem.devices.cuda.copies import SlotEvents
from tandem.devices.cuda.kernels import DeviceKernels
from tandem.devices.cuda.resident import ResidentLayers
from tandem.devices.cuda.streams import CudaStreams, Event, Stream, Work
from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.cache.sizing import DeviceMemory, OutOfDeviceMemoryError
from tandem.experts.cache.slots import SlotUse
from tandem.experts.execution.batch import ExpertBatch
from tandem.experts.execution.device import Device, DeviceLostError
from tandem.experts.execution.expert_kernels import WeightSource
from tandem.experts.execution.routing import SumRows
from tandem.experts.execution.row_memory import RowMemory
from tandem.kernels.formats.weight_format import aligned

if TYPE_CHECKING:
    from tandem.triton_kernels.experts import TritonExperts

# Tensors from `download` stay valid for this many more downloads; a layer makes at most three.
_DOWNLOADS_KEPT = 4


class CudaDevice(Device):
    """A GPU: allocates device memory, and runs batches on the model's stream."""

    name = "cuda"
    runs_in_parallel = True

    def __init__(
        self,
        streams: CudaStreams,
        kernels: DeviceKernels,
        *,
        pin_limit_bytes: int | None = None,
        on_busy: Callable[[float], None] | None = None,
        is_watched: Callable[[], bool] = lambda: True,
    ) -> None:
        """Take a GPU's streams, and the kernels that compute its batches.

        `pin` pins at most `pin_limit_bytes` of host memory; None: no limit. `on_busy` receives the
        seconds of each batch that is launched while `is_watched` returns True, once they are known.
        """
        self.streams = streams
        self.events = SlotEvents()
        self._kernels = kernels
        self._may_pin_bytes = pin_limit_bytes
        self._pinned: list[Tensor] = []
        self.rows = RowMemory(lambda count: streams.empty(4 * count).view(torch.float32))
        self.host_rows = RowMemory(lambda count: streams.pinned(4 * count).view(torch.float32))
        self._downloads = [PinnedArena(streams) for _ in range(_DOWNLOADS_KEPT)]
        self._uploads = PinnedArena(streams)
        self._num_downloads = 0
        self._on_busy, self._is_watched = on_busy, is_watched
        self._batches: list[tuple[Event, Event]] = []  # (begin, end) since the last download

    def memory(self) -> DeviceMemory:
        """Return total and free memory."""
        return self.streams.memory()

    def allocate(self, num_bytes: int) -> Tensor:
        """Return memory for slots, which torch's allocator frees with the last reference to it.

        Raises `OutOfDeviceMemoryError`.
        """
        with torch.inference_mode(False):  # otherwise only inference mode could write to it
            try:
                memory = self.streams.empty(num_bytes)
            except OutOfDeviceMemoryError as error:
                left = format_bytes(self.memory().free_bytes)
                raise OutOfDeviceMemoryError(
                    f"{self.streams.name} has {left} left for Tandem and {format_bytes(num_bytes)} "
                    "were requested; lower gpu_memory"
                ) from error
        # The model's stream may just have freed this memory, and copies run on another stream.
        self.streams.synchronize()
        return memory

    def pin(self, memory: Tensor) -> bool:
        """Pin host memory until the device is closed; False if a limit or the system forbids it."""
        if any(memory.data_ptr() == pinned.data_ptr() for pinned in self._pinned):
            return True
        if self._may_pin_bytes is not None and memory.nbytes > self._may_pin_bytes:
            return False
        if not self.streams.pin(memory):
            return False
        if self._may_pin_bytes is not None:
            self._may_pin_bytes -= memory.nbytes
        self._pinned.append(memory)
        return True

    def download(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Return copies of `tensors` on the host; a layer waits for the GPU only here."""
        streams = self.streams
        self._num_downloads += 1
        arena = self._downloads[self._num_downloads % _DOWNLOADS_KEPT]
        arena.reset()
        hosts = [arena.take_like(tensor) for tensor in tensors]

        def copy() -> None:
            for host, tensor in zip(hosts, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)

        streams.run(Stream.COMPUTE, copy)
        streams.record(Stream.COMPUTE).synchronize()
        self._uploads.reset()
        if self._on_busy is not None:  # all batches are done: they precede the copies on the stream
            for first, last in self._batches:
                self._on_busy(streams.between(first, last))
            self._batches.clear()
        return hosts

    def add_busy(self, seconds: float) -> None:
        """Report to `on_busy` the seconds of work that other code has run on the compute stream."""
        if self._on_busy is not None:
            self._on_busy(seconds)

    def forget_rows(self) -> None:
        """Wait for the device; the next layer call allocates new `rows` and `host_rows`."""
        self._batches.clear()
        with contextlib.suppress(RuntimeError):
            self.streams.synchronize()
        super().forget_rows()

    def launch(self, batch: ExpertBatch, use: SlotUse) -> None:
        """Queue a batch; the stream runs it after the copies of the batch's experts."""
        streams, begin = self.streams, None
        is_timed = self._on_busy is not None and self._is_watched()
        try:
            work = self.prepared(batch, use)
            if is_timed:
                begin = streams.record(Stream.COMPUTE, is_timed=True)
            streams.run(Stream.COMPUTE, work)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemoryError(str(error).partition("\n")[0]) from error
        finally:
            end = streams.record(Stream.COMPUTE, is_timed=is_timed)
            self.events.note_read(use.claims, end)
            use.end()
        if begin is not None:
            self._batches.append((begin, end))

    def prepared(self, batch: ExpertBatch, source: WeightSource) -> Work:
        """Do the host's part of a batch; return the work to queue on the compute stream.

        From this call on, the stream waits for the copies into the slots that `source` claims.
        """
        prepared = self._kernels.prepare(batch, source)
        table = self._staged(prepared.table)
        return lambda: prepared.launch(self._copied(table))

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Queue a copy; a source outside `host_rows` is first copied to pinned memory."""
        host = source if self.host_rows.holds(source) else self._staged(source)

        def copy() -> None:
            target.copy_(host, non_blocking=True)

        self.streams.run(Stream.COMPUTE, copy)

    def prepare_sum(self, row_of: Tensor, weights: Tensor) -> SumRows:
        """Queue the copy of `row_of` now; return a function that queues the weighted sum."""
        num_tokens, staged = row_of.shape[0], self._staged(row_of)
        on_device: list[Tensor] = []
        self.streams.run(Stream.COMPUTE, lambda: on_device.append(self._copied(staged)))

        def sum_rows(rows: Tensor) -> Tensor:
            out = rows.new_empty(num_tokens, rows.shape[1])

            def add() -> None:
                self._kernels.add_rows(rows, on_device[0], weights, out)

            self.streams.run(Stream.COMPUTE, add)
            return out

        return sum_rows

    def close(self) -> None:
        """Wait for the GPU, unpin host memory, and lift the limit on the GPU's memory."""
        with contextlib.suppress(RuntimeError):  # the error of a GPU that is no longer used
            self.streams.synchronize()
        while self._pinned:
            self.streams.unpin(self._pinned.pop())
        self.streams.limit(None)

    def resident(self, cache: ExpertCache) -> ResidentLayers | None:
        """Return the object that computes layers without plans where all experts are resident.

        Returns None if the device's kernels cannot do that.
        """
        experts = self.grouped_experts
        return None if experts is None else ResidentLayers(cache, experts, self.streams)

    @property
    def grouped_experts(self) -> "TritonExperts | None":
        """The kernels that find experts by their addresses on the device; None: torch computes."""
        return self._kernels.grouped

    def require_usable(self) -> None:
        """Raise `DeviceLostError` if an error has made the GPU unusable for this process."""
        try:
            self.streams.synchronize()
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise DeviceLostError(
                f"the GPU has stopped working for this program ({first_line}); start it again"
            ) from error

    def _staged(self, source: Tensor) -> Tensor:
        host = self._uploads.take_like(source)
        host.copy_(source)
        return host

    def _copied(self, host: Tensor) -> Tensor:
        memory = torch.empty_like(host, device=self.streams.device)
        return memory.copy_(host, non_blocking=True)


class PinnedArena:
    """Pinned memory that is handed out in parts and taken back as a whole."""

    def __init__(self, streams: CudaStreams) -> None:
        """Take the streams, which allocate the pinned memory on first use."""
        self._streams = streams
        self._memory: Tensor | None = None
        self._used_bytes = 0

    def reset(self) -> None:
        """Take all parts back for reuse; nothing may still use them."""
        self._used_bytes = 0

    def take_like(self, tensor: Tensor) -> Tensor:
        """Return pinned memory of a tensor's shape and dtype, contiguous."""
        size = tensor.numel() * tensor.element_size()
        end = self._used_bytes + size
        if self._memory is None or end > self._memory.numel():
            # Views keep the previous memory alive.
            with torch.inference_mode(False):
                self._memory = self._streams.pinned(max(1 << 16, 2 * size))
            self._used_bytes, end = 0, size
        piece = self._memory[self._used_bytes : end].view(tensor.dtype).view(tensor.shape)
        self._used_bytes = aligned(end)  # aligned for views of any dtype
        return piece

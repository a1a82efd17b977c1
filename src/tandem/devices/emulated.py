"""A simulated GPU on the CPU: memory of its own and real arithmetic.

On a virtual clock batches run in the caller's thread, one after another. With `has_thread` they
run on a thread of their own beside the CPU's share, for the wall clock.
"""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch
from torch import Tensor

from tandem.core.units import format_bytes
from tandem.experts.cache.sizing import DeviceMemory, OutOfDeviceMemoryError
from tandem.experts.cache.slots import SlotUse
from tandem.experts.execution.batch import ExpertBatch
from tandem.experts.execution.device import Device
from tandem.experts.execution.expert_kernels import ExpertKernels
from tandem.experts.execution.routing import SumRows
from tandem.experts.execution.row_memory import RowMemory


class EmulatedDevice(Device):
    """Memory that is counted, and computation in order."""

    name = "emulated"

    def __init__(
        self, total_bytes: int, kernels: ExpertKernels, *, has_thread: bool = False
    ) -> None:
        """Own `total_bytes` of (host) memory; compute with `kernels`."""
        self.total_bytes = total_bytes
        self.computes_beside = has_thread
        self.used_bytes = 0
        self._kernels = kernels
        self._rows, self._host_rows = RowMemory(), RowMemory()
        self._worker = _Worker(self.run) if has_thread else None

    def memory(self) -> DeviceMemory:
        """Return what there is, and what is left of it."""
        return DeviceMemory(self.total_bytes, self.total_bytes - self.used_bytes)

    def allocate(self, num_bytes: int) -> Tensor:
        """Return zeroed memory; raises `OutOfDeviceMemoryError`."""
        free_bytes = self.total_bytes - self.used_bytes
        if num_bytes > free_bytes:
            raise OutOfDeviceMemoryError(
                f"the emulated device has {format_bytes(free_bytes)} free and "
                f"{format_bytes(num_bytes)} were asked for; lower gpu_memory"
            )
        self.used_bytes += num_bytes
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")

    def release(self, memory: Tensor) -> None:
        """Give memory back."""
        self.used_bytes -= memory.nbytes

    def pin(self, memory: Tensor) -> bool:
        """No-op: a copy within one memory is not faster."""
        return True

    def download(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Return the tensors: the model's state lies where the host can read it."""
        return tensors

    def rows(self, num_rows: int, width: int) -> Tensor:
        """Return memory for rows of the device."""
        return self._rows.rows(num_rows, width)

    def host_rows(self, num_rows: int, width: int) -> Tensor:
        """Return memory for rows of the host, apart from the device's."""
        return self._host_rows.rows(num_rows, width)

    def forget_rows(self) -> None:
        """Take new memory next time."""
        self._rows.forget()
        self._host_rows.forget()

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Copy at once: no batch reads or writes the target."""
        target.copy_(source)

    def prepare_sum(self, row_of: Tensor, weights: Tensor) -> SumRows:
        """Wait for the batches when it comes to the sum."""
        sum_rows = self._kernels.prepare_sum(row_of, weights)

        def after_all(rows: Tensor) -> Tensor:
            self.synchronize()
            return sum_rows(rows)

        return after_all

    def launch(self, batch: ExpertBatch, use: SlotUse) -> None:
        """Compute a batch from its slots."""
        if self._worker is not None:
            self._worker.put(batch, use)
        else:
            self.run(batch, use)

    def synchronize(self) -> None:
        """Return when all launched batches are done; raises the first error of any of them."""
        if self._worker is not None:
            self._worker.wait()

    def close(self) -> None:
        """End the device's thread."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None  # it holds this device

    def run(self, batch: ExpertBatch, use: SlotUse) -> None:
        """Compute a batch now, on this thread."""
        try:
            self._kernels.run(batch, use)
        finally:
            use.end()


class _Worker:
    """A thread that runs batches in order."""

    def __init__(self, run: Callable[[ExpertBatch, SlotUse], None]) -> None:
        self._run = run
        self._queue: SimpleQueue[tuple[ExpertBatch, SlotUse] | None] = SimpleQueue()
        self._done = threading.Condition()
        self._open = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name="tandem-device", daemon=True)
        self._thread.start()

    def put(self, batch: ExpertBatch, use: SlotUse) -> None:
        with self._done:
            self._open += 1
        self._queue.put((batch, use))

    def wait(self) -> None:
        with self._done:
            self._done.wait_for(lambda: self._open == 0)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        self._queue.put(None)
        if self._thread is not threading.current_thread():  # garbage is collected on any thread
            self._thread.join()

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._run(*item)
            except BaseException as error:
                self._error = self._error or error
            del item  # its batch holds a model's state, and the next one may be long in coming
            with self._done:
                self._open -= 1
                self._done.notify_all()

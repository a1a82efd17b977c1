"""The emulated device with a thread of its own, which computes beside the CPU's share."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from torch import Tensor

from tandem.devices.emulated import EmulatedDevice
from tandem.experts.cache.slots import SlotUse
from tandem.experts.execution.batch import ExpertBatch
from tandem.experts.execution.expert_kernels import ExpertKernels
from tandem.experts.execution.routing import SumRows


class ThreadedDevice(EmulatedDevice):
    """Computes batches on a thread for the wall clock, or as the emulated device does."""

    def __init__(
        self, total_bytes: int, kernels: ExpertKernels, *, has_thread: bool = False
    ) -> None:
        super().__init__(total_bytes, kernels)
        self.runs_in_parallel = has_thread
        self._worker = _Worker(self.run) if has_thread else None

    def run(self, batch: ExpertBatch, use: SlotUse) -> None:
        """Compute a batch on the calling thread."""
        super().launch(batch, use)

    def prepare_sum(self, row_of: Tensor, weights: Tensor) -> SumRows:
        sum_rows = super().prepare_sum(row_of, weights)

        def after_all(rows: Tensor) -> Tensor:
            self.synchronize()
            return sum_rows(rows)

        return after_all

    def launch(self, batch: ExpertBatch, use: SlotUse) -> None:
        if self._worker is not None:
            self._worker.put(batch, use)
        else:
            self.run(batch, use)

    def synchronize(self) -> None:
        if self._worker is not None:
            self._worker.wait()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None  # it holds this device


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
            del item  # its batch holds a model's state, and the next one may come much later
            with self._done:
                self._open -= 1
                self._done.notify_all()

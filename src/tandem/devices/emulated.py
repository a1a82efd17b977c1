"""A simulated GPU: part of host memory is its memory, and the CPU computes its batches in order."""

from collections.abc import Sequence

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
    """A device that counts its memory and computes batches in order, on the CPU."""

    name = "emulated"
    runs_in_parallel = False

    def __init__(self, total_bytes: int, kernels: ExpertKernels) -> None:
        """Limit the device to `total_bytes` of host memory; `kernels` compute its batches."""
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self._kernels = kernels
        self.rows, self.host_rows = RowMemory(), RowMemory()

    def memory(self) -> DeviceMemory:
        """Return total and free memory."""
        return DeviceMemory(self.total_bytes, self.total_bytes - self.used_bytes)

    def allocate(self, num_bytes: int) -> Tensor:
        """Return zeroed memory (num_bytes,) uint8; `OutOfDeviceMemoryError` if less is free."""
        free_bytes = self.total_bytes - self.used_bytes
        if num_bytes > free_bytes:
            raise OutOfDeviceMemoryError(
                f"the emulated device has {format_bytes(free_bytes)} free and "
                f"{format_bytes(num_bytes)} were requested; lower gpu_memory"
            )
        self.used_bytes += num_bytes
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")

    def release(self, memory: Tensor) -> None:
        """Count the bytes of `memory` as free again."""
        self.used_bytes -= memory.nbytes

    def pin(self, memory: Tensor) -> bool:
        """Return True without pinning, which would not make copies within host memory faster."""
        return True

    def download(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Return the tensors themselves, because the host can read them."""
        return tensors

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Copy at once, because all launched batches have already been computed."""
        target.copy_(source)

    def prepare_sum(self, row_of: Tensor, weights: Tensor) -> SumRows:
        """Return the CPU kernels' function for the weighted sum; see `Device.prepare_sum`."""
        return self._kernels.prepare_sum(row_of, weights)

    def launch(self, batch: ExpertBatch, use: SlotUse) -> None:
        """Compute a batch at once from the slots that `use` has claimed, and end the use."""
        try:
            self._kernels.run(batch, use)
        finally:
            use.end()

    def synchronize(self) -> None:
        """No-op: launched batches are done."""

    def close(self) -> None:
        """No-op: nothing needs to be released."""

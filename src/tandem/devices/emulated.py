"""A simulated GPU on the CPU: memory of its own and real arithmetic, batches one after another."""

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
        """Own `total_bytes` of host memory as device memory; compute with `kernels`."""
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self._kernels = kernels
        self.rows, self.host_rows = RowMemory(), RowMemory()

    def memory(self) -> DeviceMemory:
        """Return total and free memory."""
        return DeviceMemory(self.total_bytes, self.total_bytes - self.used_bytes)

    def allocate(self, num_bytes: int) -> Tensor:
        """Return zeroed memory; raises `OutOfDeviceMemoryError`."""
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
        """No-op: a copy within one memory is not faster."""
        return True

    def download(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Return the tensors themselves, because the host can read them."""
        return tensors

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Copy at once, because no launched batch is still reading or writing the target."""
        target.copy_(source)

    def prepare_sum(self, row_of: Tensor, weights: Tensor) -> SumRows:
        """Return the function of the CPU's kernels that computes the weighted sum."""
        return self._kernels.prepare_sum(row_of, weights)

    def launch(self, batch: ExpertBatch, use: SlotUse) -> None:
        """Compute a batch at once from the slots of its experts."""
        try:
            self._kernels.run(batch, use)
        finally:
            use.end()

    def synchronize(self) -> None:
        """No-op: launched batches are done."""

    def close(self) -> None:
        """No-op."""

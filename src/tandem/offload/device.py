"""What an accelerator must be able to do: give memory, and compute batches beside the host.

Implementations: `EmulatedDevice` (all of it on the CPU). A device owns its lane of computation;
copies into its memory are the copy engine's.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

from tandem.core.errors import CapacityError
from tandem.offload.batch import ExpertBatch
from tandem.offload.slots import MemoryPool, SlotUse


class OutOfDeviceMemoryError(CapacityError):
    """The device has no memory left for a slot or for work; the cache shrinks and goes on."""


class DeviceMemory(NamedTuple):
    """A device's memory now."""

    total_bytes: int
    free_bytes: int


class Device(MemoryPool, Protocol):
    """An accelerator."""

    name: str

    def memory(self) -> DeviceMemory:
        """Return what there is, and what is left of it."""

    def pin(self, memory: Tensor) -> bool:
        """Make host memory fast to copy from; False if the system does not let."""

    def launch(self, batch: ExpertBatch, use: SlotUse) -> None:
        """Compute a batch after those launched before it; may return before it is done.

        The device waits for `use.images()`, an expert each, and calls `use.end` when it has read
        them, also after an error. Raises `OutOfDeviceMemoryError` if there is no room to work.
        """

    def synchronize(self) -> None:
        """Return when all launched batches are done; raises the first error of any of them."""

    def close(self) -> None:
        """End the device's threads."""

"""The interface of an accelerator: it provides memory, and computes batches beside the host.

A device owns the compute stream; the copy engine copies into its slots. The model's state (hidden,
choice, gate weights) is on the device. The order in one layer is:

    download(choice, hidden)     one wait; the only one before the batches
      -> launch(batch, use)...   rows stay in the device's `rows`, tokens are read from its `hidden`
      -> upload(host rows)       once, if the CPU had a share: its rows are the last rows
      -> prepare_sum(...)(rows)  the sum, on the device, after all launches and uploads

Only `download` has to wait for the device. It also ends all reads of host memory by earlier layers,
so that `host_rows` may be written again. If the plan gives a layer to the CPU alone, the host
computes the sum and uploads only the result.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from tandem.core.errors import ExecutionError
from tandem.experts.cache.sizing import DeviceMemory
from tandem.experts.cache.slots import MemoryPool, SlotUse
from tandem.experts.execution.batch import ExpertBatch, ExpertFunctions
from tandem.experts.execution.routing import SumRows
from tandem.experts.execution.row_memory import RowMemory
from tandem.experts.tracing.events import LayerExecuted

if TYPE_CHECKING:
    from tandem.experts.cache.expert_cache import ExpertCache


class DeviceLostError(ExecutionError):
    """The device hangs or is broken; only a new process can use it again."""


class WholeCache(Protocol):
    """Computes layers while all experts are resident: the host need not know what routers chose."""

    def serves(self, functions: ExpertFunctions) -> bool:
        """Tell whether a layer with these functions can be computed now, without a plan."""

    def execute(
        self,
        layer: int,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        functions: ExpertFunctions,
    ) -> Tensor:
        """Queue a layer on the device; return its result as `Executor.execute` does."""

    def note(self, layer: int, top_k_index: Tensor) -> None:
        """Queue a copy of a layer's choice to the host; `noted` will yield an event with it."""

    def noted(self, now: float) -> Iterator[LayerExecuted]:
        """Yield an event for each layer noted since the last call, once its choice has arrived."""


class Device(MemoryPool, Protocol):
    """An accelerator."""

    runs_in_parallel: bool
    """Whether launched batches run in parallel with the host. If so, the host starts its own share
    before it launches them."""
    rows: RowMemory
    """Device memory for routed tokens' results, reused from call to call."""
    host_rows: RowMemory
    """Host memory for routed tokens' results, reused from call to call; `upload` reads it fast."""

    def memory(self) -> DeviceMemory:
        """Return total and free memory."""

    def pin(self, memory: Tensor) -> bool:
        """Pin host memory; return False if the system refuses."""

    def download(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Return host copies of the device's tensors in their present state, with one wait."""

    def forget_rows(self) -> None:
        """Give up the memory of `rows` and `host_rows`; the next call allocates new memory.

        To be called after a failed call, which may still write to the memory.
        """
        self.rows.forget()
        self.host_rows.forget()

    def launch(self, batch: ExpertBatch, use: SlotUse) -> None:
        """Queue a batch behind those launched earlier; may return before it is computed.

        `batch.hidden` and `batch.out` are in the device's memory, `batch.token` on the host.
        The device must wait for `use.images()`, one image per expert, and call `use.end` when it
        has read the images, also after an error. Raises `OutOfDeviceMemoryError` if there is no
        memory for workspace.
        """

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Copy host memory to the device; the copy must precede all later launches."""

    def prepare_sum(self, row_of: Tensor, weights: Tensor) -> SumRows:
        """Return a function that sums weight * row over each token's top-k, first to last.

        The function must be called after all launches and uploads. It takes rows (n_rows, width)
        fp32 and returns (n_tokens, width) fp32, both on the device. `weights` (n_tokens, top_k)
        fp32 are on the device, `row_of` (n_tokens, top_k) int32 is on the host; -1 adds nothing.
        Product and addition must be rounded separately. The first error of any batch is raised by
        the function, or by its next call.
        """

    def resident(self, cache: "ExpertCache") -> "WholeCache | None":
        """Return an object that computes layers without plans while all experts are resident.

        Returns None if the device always needs plans.
        """
        return None

    def require_usable(self) -> None:
        """Raise `DeviceLostError` if an error has made the device unusable for this program."""
        return

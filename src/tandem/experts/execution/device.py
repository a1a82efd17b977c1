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
    """Layers whose experts are all resident; the host does not need the routers' choices."""

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
        """Queue a layer; see `Executor.execute`."""

    def note(self, layer: int, top_k_index: Tensor) -> None:
        """Queue the copy of a choice to the host; `noted` reports it."""

    def noted(self, now: float) -> Iterator[LayerExecuted]:
        """Yield an event for each noted layer, once; waits until its choice is on the host."""


class Device(MemoryPool, Protocol):
    """An accelerator."""

    runs_in_parallel: bool
    """Whether launched batches run in parallel with the host, which then starts its own share
    first."""
    rows: RowMemory
    """Reused device buffer for routed tokens' results."""
    host_rows: RowMemory
    """Reused host buffer for routed tokens' results, from which `upload` is fast."""

    def memory(self) -> DeviceMemory:
        """Return total and free memory."""

    def pin(self, memory: Tensor) -> bool:
        """Pin host memory; False if the system refuses."""

    def download(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Return host copies of the device's tensors in their present state, with one wait."""

    def forget_rows(self) -> None:
        """Stop reusing the present memory, because a broken call may still write to it."""
        self.rows.forget()
        self.host_rows.forget()

    def launch(self, batch: ExpertBatch, use: SlotUse) -> None:
        """Compute a batch after those launched before it; may return before it is done.

        `batch.hidden` and `batch.out` are in the device's memory, `batch.token` on the host.
        The device must wait for `use.images()`, one image per expert, and call `use.end` when it
        has read the images, also after an error. Raises `OutOfDeviceMemoryError` if there is no
        memory for workspace.
        """

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Copy host memory to the device; the copy must precede all later launches."""

    def prepare_sum(self, row_of: Tensor, weights: Tensor) -> SumRows:
        """Return a function that sums weight * row over k, first to last, after all batches.

        The function takes rows (n_rows, width) fp32 and returns (n_tokens, width) fp32, both on the
        device. `weights` (n_tokens, top_k) fp32 are on the device, `row_of` (n_tokens, top_k) int32
        is on the host; -1 adds nothing. Product and addition must be rounded separately. The first
        error of any batch is raised by the function, or by its next call.
        """

    def resident(self, cache: "ExpertCache") -> "WholeCache | None":
        """Return an object that computes layers without plans once all experts are resident.

        None: the device always needs plans.
        """
        return None

    def require_usable(self) -> None:
        """Raise `DeviceLostError` if an error has made the device unusable for this program."""
        return

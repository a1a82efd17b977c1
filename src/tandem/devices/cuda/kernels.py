"""Computes a batch of experts on a GPU: Triton for packed experts, torch for all others.

Work is queued on the current stream; nothing waits.
"""

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tandem.devices.cuda.checks import TRITON_MATRIX_CAPABILITY, Gpu
from tandem.experts.execution.batch import ExpertBatch, ExpertFunctions
from tandem.experts.execution.expert_kernels import WeightSource, compute_in_torch
from tandem.experts.store.host_store import HostLayer
from tandem.experts.store.packed_layer import PackedLayer

if TYPE_CHECKING:
    from tandem.triton_kernels.experts import TritonExperts


class Prepared(NamedTuple):
    """A batch for which the host's work is done, except the launch."""

    table: Tensor
    """The batch's table on the host; it is copied to the device before the launch."""
    launch: Callable[[Tensor], None]
    """Queues the batch, given the table on the device."""


LayerFunctions = tuple[HostLayer, ExpertFunctions]


class TorchKernels:
    """Computes one expert after another in torch; unpacks packed weights in every call."""

    name = "torch"

    def compilations(
        self, layers: Sequence[LayerFunctions], dtype: torch.dtype, top_k: int, device: torch.device
    ) -> Sequence[Callable[[], None]]:
        """Return no callables, because torch compiles no kernels."""
        return ()

    def prepare(self, batch: ExpertBatch, use: WeightSource) -> Prepared:
        """Return `batch`, ready to launch; `use` has the memory of the batch's experts."""
        images = use.images()
        return Prepared(batch.token, lambda token: compute_in_torch(batch, token, images))

    def add_rows(self, rows: Tensor, row_of: Tensor, weights: Tensor, out: Tensor) -> None:
        """Write each token's sum of `weights[k] * rows[row_of[k]]`, k ascending, to `out`.

        A `row_of` of -1 adds nothing. All tensors must be on the device.
        """
        padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])  # -1 selects the row of zeros
        total = torch.zeros_like(out, dtype=torch.float32)
        for k in range(row_of.shape[1]):
            total += weights[:, k, None].float() * padded[row_of[:, k].long()]
        out.copy_(total)

    @property
    def grouped(self) -> None:
        """None, because a loop over experts needs the experts' numbers on the host."""


class TritonKernels:
    """Computes all experts of a packed batch in two launches; torch computes unpacked batches."""

    name = "triton"

    def __init__(self, experts: "TritonExperts") -> None:
        """Take the kernels for packed experts."""
        self._experts = experts
        self._torch = TorchKernels()

    def compilations(
        self, layers: Sequence[LayerFunctions], dtype: torch.dtype, top_k: int, device: torch.device
    ) -> Sequence[Callable[[], None]]:
        """Return callables that compile the kernels for each layout and activation of `layers`.

        Each launches a kernel once, on the current stream.
        """
        from tandem.triton_kernels.variants import variants

        different = {
            (host.layout, functions.native): functions
            for host, functions in layers
            if isinstance(host, PackedLayer)
        }
        return [
            launch
            for (layout, native), functions in different.items()
            for launch in variants(
                self._experts,
                layout,
                native,
                functions.unpacked_activate or functions.activate,
                dtype=dtype,
                top_k=top_k,
                device=device,
            )
        ]

    def prepare(self, batch: ExpertBatch, use: WeightSource) -> Prepared:
        """Return a batch ready to launch, with its table of expert addresses and routed tokens."""
        from tandem.triton_kernels.rows import row_table

        layer, functions = batch.layer, batch.functions
        if not isinstance(layer, PackedLayer):
            return self._torch.prepare(batch, use)
        layout, table = layer.layout, row_table(use.addresses(), batch.begin, batch.token)

        def launch(memory: Tensor) -> None:
            self._experts.compute(
                layout,
                functions.native,
                batch.hidden.contiguous(),
                table.on(memory),
                batch.out,
                functions.unpacked_activate or functions.activate,
            )

        return Prepared(table.memory, launch)

    def add_rows(self, rows: Tensor, row_of: Tensor, weights: Tensor, out: Tensor) -> None:
        """Launch the kernel that computes the weighted sum; see `TorchKernels.add_rows`."""
        self._experts.add_rows(rows.contiguous(), row_of, weights.contiguous(), out)

    @property
    def grouped(self) -> "TritonExperts":
        """The Triton kernels, which find experts by their addresses on the device."""
        return self._experts


DeviceKernels = TorchKernels | TritonKernels
"""Computes batches on a device and sums their rows there."""


def best_kernels(gpu: Gpu | None = None) -> DeviceKernels:
    """Return Triton kernels for a GPU; if Triton is missing, warn and return torch's kernels.

    None stands for a GPU whose matrix units Triton can use.
    """
    if importlib.util.find_spec("triton") is None:
        warnings.warn(
            "Triton is not installed, so the GPU computes experts with torch, many times slower; "
            "pip install triton",
            stacklevel=2,
        )
        return TorchKernels()
    from tandem.triton_kernels.experts import TritonExperts

    has_matrix_units = gpu is None or gpu.capability >= TRITON_MATRIX_CAPABILITY
    return TritonKernels(TritonExperts(has_matrix_units=has_matrix_units))

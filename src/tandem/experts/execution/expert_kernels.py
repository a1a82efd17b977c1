"""Computes a batch of experts on the CPU: packed ones natively, others in torch.

A row's result depends neither on other rows' experts nor on where the weights are.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tandem.experts.execution.batch import ExpertBatch, ExpertFunctions, RoutedCall
from tandem.experts.execution.routed_layers import RoutedLayers
from tandem.experts.execution.routing import SumRows
from tandem.experts.store.host_store import HostLayer
from tandem.experts.store.packed_layer import PackedLayer
from tandem.kernels.dense import CpuThreads
from tandem.kernels.native import compute_experts_with
from tandem.kernels.reference import expert_ffn


class WeightSource(Protocol):
    """Says where the weights of a batch's experts are, if not in the host store."""

    def images(self) -> Sequence[Tensor]:
        """Wait until the experts' memory is filled; return each expert's memory."""

    def addresses(self) -> Sequence[int]:
        """Wait until the experts' memory is filled; return each expert's address."""


class ExpertKernels:
    """Computes batches on CPU threads, which start with the first packed batch. Not thread-safe."""

    def __init__(
        self,
        threads: CpuThreads,
        *,
        on_busy: Callable[[float], None] | None = None,
    ) -> None:
        """Compute with `threads`; `on_busy` gets the seconds of every batch."""
        self._on_busy = on_busy
        self.threads = threads
        self._routed: RoutedLayers | None = None

    def wake(self) -> None:
        """Wake the threads, if started, so that they are awake once a call is prepared."""
        if self._routed is not None:
            self.threads.engine.wake()

    def run(self, batch: ExpertBatch, source: WeightSource | None = None) -> None:
        """Compute a batch into its `out`; weights come from `source`, or from the host store."""
        self.start(batch, source).finish()

    def start(self, batch: ExpertBatch, source: WeightSource | None = None) -> "StartedWork":
        """Start a batch on the threads; the result's `finish` computes beside them and waits.

        No other method of this object may be called before `finish`. Batches that the native
        kernels do not support are computed by `finish` alone.
        """
        begin = time.perf_counter() if self._on_busy else 0.0
        native = None
        if isinstance(batch.layer, PackedLayer):
            addresses = source.addresses() if source is not None else None
            native = self.routed.start_batch(batch, addresses)
        if native is not None:
            return StartedWork(native.finish, batch, self._on_busy, begin)
        return StartedWork(lambda: self._run_in_torch(batch, source), batch, self._on_busy, begin)

    def prepare_sum(self, row_of: Tensor, weights: Tensor) -> SumRows:
        """Return a function that sums weight * row over each token's top-k, first to last.

        The function takes rows (n_rows, width) fp32 and returns (n_tokens, width) fp32. `weights`
        (n_tokens, top_k) are fp32. `row_of` (n_tokens, top_k), int32 and contiguous, has the index
        of each choice's row, or -1 for no row.
        """
        num_tokens, weights = len(row_of), weights.contiguous()
        add_rows = self.threads.engine.add_rows

        def sum_rows(rows: Tensor) -> Tensor:
            out = torch.empty(num_tokens, rows.shape[1], device="cpu")
            add_rows(rows.contiguous(), row_of, weights, out)
            return out

        return sum_rows

    def run_directly(
        self, layer: HostLayer, functions: ExpertFunctions, call: RoutedCall
    ) -> tuple[Tensor, int] | None:
        """Compute all active experts of a packed layer; see `RoutedLayers.run_directly`.

        Returns None for a plain layer.
        """
        if not isinstance(layer, PackedLayer):
            return None
        if self._on_busy is None:
            return self.routed.run_directly(layer, functions, call)
        begin = time.perf_counter()
        found = self.routed.run_directly(layer, functions, call)
        self._on_busy(time.perf_counter() - begin)
        return found

    @property
    def routed(self) -> RoutedLayers:
        """The layers in native form; the first access starts the threads."""
        if self._routed is None:
            self._routed = RoutedLayers(self.threads.engine)
        return self._routed

    def _run_in_torch(self, batch: ExpertBatch, source: WeightSource | None) -> None:
        """Compute a batch in torch: all of a plain layer, only the activation of a packed one."""
        layer = batch.layer
        if not isinstance(layer, PackedLayer):
            images = None if source is None else source.images()
            compute_in_torch(batch, batch.token, images)
            return
        if source is not None:
            self._run_at(source.addresses(), batch)
        elif layer.slots is None:
            first, stride = layer.buffers.data_ptr(), layer.buffers.stride(0)
            self._run_at([first + expert * stride for expert in batch.experts], batch)
        else:
            for one in batch.by_expert():
                with layer.hold(one.experts[0]) as (extent,):
                    self._run_at([extent.data.data_ptr()], one)

    def _run_at(self, addresses: Sequence[int], batch: ExpertBatch) -> None:
        """Compute packed experts whose bytes are at `addresses`, with the activation in torch."""
        layer, functions = batch.layer, batch.functions
        assert isinstance(layer, PackedLayer)
        activate = functions.unpacked_activate or functions.activate
        dtype = batch.hidden.dtype  # the model's own code expects this dtype
        begin = torch.tensor(
            [row - batch.begin[0] for row in batch.begin], dtype=torch.int32, device="cpu"
        )
        compute_experts_with(
            self.threads.engine,
            layer.layout,
            torch.tensor(addresses, dtype=torch.int64, device="cpu"),
            lambda up: activate(up.to(dtype)).float(),
            batch.hidden_fp32,
            begin,
            batch.token,
            batch.out,
        )


@dataclass(frozen=True, slots=True)
class StartedWork:
    """A batch whose computation has begun; `finish` completes it."""

    _finish: Callable[[], None]
    _batch: ExpertBatch
    """Stored only so that its tensors live until the end."""
    _on_busy: Callable[[float], None] | None
    _begin: float

    def finish(self) -> None:
        """Compute beside the threads; on return the batch's `out` is filled."""
        self._finish()
        if self._on_busy is not None:
            self._on_busy(time.perf_counter() - self._begin)


def compute_in_torch(batch: ExpertBatch, token: Tensor, images: Sequence[Tensor] | None) -> None:
    """Compute a batch expert by expert on the device of `token`.

    Weights come from `images`, or from the host store if `images` is None.
    """
    layer, functions, first = batch.layer, batch.functions, batch.begin[0]
    is_packed = isinstance(layer, PackedLayer)
    activate = (functions.unpacked_activate if is_packed else None) or functions.activate
    for i, expert in enumerate(batch.experts):
        chosen = slice(batch.begin[i] - first, batch.begin[i + 1] - first)
        weights = layer.weights(expert) if images is None else layer.weights_in(images[i])
        batch.out[chosen] = expert_ffn(batch.hidden[token[chosen]], weights, activate).float()

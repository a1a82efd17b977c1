"""Computes a batch of experts on the CPU: packed ones natively, others in torch.

The result of a row does not depend on the other rows' experts, nor on where the weights lie.
"""

import functools
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.kernels.cpu import detect_cpu
from tandem.kernels.native import NativeExperts
from tandem.kernels.reference import expert_ffn
from tandem.offload.batch import ExpertBatch, ExpertFunctions
from tandem.offload.host_store import HostLayer
from tandem.offload.packed_layer import PackedLayer
from tandem.offload.routed_layers import RoutedLayers


class ExpertKernels:
    """The kernels and their threads, which start with the first packed batch. One call a time."""

    def __init__(
        self,
        *,
        num_threads: int | None = None,
        isa: str = "",
        on_busy: Callable[[float], None] | None = None,
    ) -> None:
        """Compute with `num_threads` threads; None takes all physical cores.

        `on_busy` is told the seconds of every batch.
        """
        self._on_busy = on_busy
        self.num_threads = num_threads or detect_cpu().physical_cores
        self.isa = isa
        self._native: NativeExperts | None = None
        self._memory = torch.empty(0)
        self._routed: RoutedLayers | None = None

    def run(self, batch: ExpertBatch, images: Sequence[Tensor] | None = None) -> None:
        """Fill the batch's `out`; weights come from `images`, an expert each, or the host store."""
        begin = time.perf_counter() if self._on_busy else 0.0
        self._run(batch, images)
        if self._on_busy:
            self._on_busy(time.perf_counter() - begin)

    def rows(self, num_rows: int, width: int) -> Tensor:
        """Return memory for (num_rows, width) fp32, which the next such call reuses.

        A new allocation of megabytes costs a page fault for every 4 KB: a tenth of a long prompt.
        """
        if self._memory.numel() < num_rows * width:
            with torch.inference_mode(False):  # else only inference mode could write to it
                self._memory = torch.empty(num_rows * width)
        return self._memory[: num_rows * width].view(num_rows, width)

    def forget_rows(self) -> None:
        """Never hand out the present memory again: a broken call may still write to it."""
        self._memory = torch.empty(0)

    def add_rows(self, rows: Tensor, row_of: Tensor, weights: Tensor) -> Tensor:
        """Add rows up to tokens with all threads; see `NativeExperts.add_rows`."""
        return self.native.add_rows(rows, row_of, weights)

    def run_routed(
        self,
        layer: HostLayer,
        functions: ExpertFunctions,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
    ) -> tuple[Tensor, int] | None:
        """Compute all experts of a layer on the CPU for few tokens; see `RoutedLayers.run`."""
        if not isinstance(layer, PackedLayer) or functions.native is None:
            return None
        if self._routed is None:
            self._routed = RoutedLayers(self.native)
        begin = time.perf_counter() if self._on_busy else 0.0
        found = self._routed.run(layer, functions, hidden, index, weights)
        if self._on_busy:
            self._on_busy(time.perf_counter() - begin)
        return found

    @property
    def native(self) -> NativeExperts:
        """The native kernels; their threads start here."""
        if self._native is None:
            self._native = NativeExperts(num_threads=self.num_threads, isa=self.isa)
        return self._native

    def _run(self, batch: ExpertBatch, images: Sequence[Tensor] | None) -> None:
        layer, functions = batch.layer, batch.functions
        if not isinstance(layer, PackedLayer):
            _run_reference(batch, images)
            return
        # By way of numpy: torch.tensor takes five times as long to read a short list.
        addresses = torch.from_numpy(np.array(_addresses(layer, batch, images), dtype=np.int64))
        rows = batch.hidden_fp32, _row_begin(batch.begin), batch.token, batch.out
        if functions.native is not None:
            self.native.compute_at(layer.layout, addresses, functions.native, *rows)
        else:
            activate = functions.unpacked_activate or functions.activate
            dtype = batch.hidden.dtype  # the model's own code expects it
            self.native.compute_with(
                layer.layout, addresses, lambda up: activate(up.to(dtype)).float(), *rows
            )


def _row_begin(begin: Sequence[int]) -> Tensor:
    first, count = begin[0], len(begin) - 1
    if begin[-1] - first == count:  # a row for each expert, as in a step of one token
        return _counting(count)
    return torch.from_numpy(np.array(begin, dtype=np.int32) - np.int32(first))


@functools.lru_cache(maxsize=256)
def _counting(count: int) -> Tensor:
    return torch.arange(count + 1, dtype=torch.int32)


def _addresses(
    layer: PackedLayer, batch: ExpertBatch, images: Sequence[Tensor] | None
) -> Sequence[int]:
    if images is not None:
        return [image.data_ptr() for image in images]
    first, size = layer.buffers.data_ptr(), layer.layout.num_bytes
    return [first + expert * size for expert in batch.experts]


def _run_reference(batch: ExpertBatch, images: Sequence[Tensor] | None) -> None:
    """Compute expert by expert in torch."""
    layer, first = batch.layer, batch.begin[0]
    for i, expert in enumerate(batch.experts):
        chosen = slice(batch.begin[i] - first, batch.begin[i + 1] - first)
        weights = layer.weights(expert) if images is None else layer.weights_in(images[i])
        rows = batch.hidden[batch.token[chosen]]
        batch.out[chosen] = expert_ffn(rows, weights, batch.functions.activate)

"""Packed layers as the native calls take them: one call for a batch, or for a whole small step.

Where the kernels know the layer's format and the model's activation; the rest goes the long way.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.kernels import _native
from tandem.kernels.dense import VALUE_DTYPES
from tandem.kernels.native import NativeActivation, NativeExperts, native_layout
from tandem.offload.batch import ExpertBatch, ExpertFunctions
from tandem.offload.host_store import HostLayer
from tandem.offload.packed_layer import PackedLayer

_TOKEN_BYTES = torch.int32.itemsize
MAX_TOKENS = 64  # more are a prompt's, where sorting in Python costs nothing


class RoutedLayers:
    """The layers of a store as the native calls take them."""

    def __init__(self, native: NativeExperts) -> None:
        """Compute with the threads of `native`, which must be idle."""
        self._engine = native._engine
        self._experts = _native.RoutedExperts(native._engine)
        self._layers: dict[int, tuple[PackedLayer, NativeActivation, Any]] = {}

    def run_batch(
        self, layer: PackedLayer, batch: ExpertBatch, addresses: Sequence[int] | None
    ) -> None:
        """Fill the rows of a batch; weights are at `addresses`, or in the host store if None."""
        activation = batch.functions.native
        assert activation is not None
        hidden, rows, tokens = batch.hidden_fp32, batch.side.rows, batch.tokens
        try:
            _native.run_batch(
                self._engine, self._native(layer, activation),
                batch.experts if addresses is None else addresses, addresses is not None,
                batch.begin, hidden.shape[0],
                tokens.data_ptr() + _TOKEN_BYTES * batch.first_token,
                rows.shape[0], hidden.data_ptr(), rows.data_ptr(),
            )  # fmt: skip
        except ValueError as error:  # rows, experts or tokens that do not exist
            raise ModelError(f"the routing of a layer is damaged: {error}") from error

    def run(
        self,
        layer: HostLayer,
        functions: ExpertFunctions,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
    ) -> tuple[Tensor, int] | None:
        """Return a layer's result and how many experts were active; None if it cannot.

        Sorts, computes and adds up natively, with every expert on the CPU.
        """
        num_tokens, activation = hidden.shape[0], functions.native
        if (
            num_tokens > MAX_TOKENS
            or activation is None
            or functions.post_norm is not None
            or not isinstance(layer, PackedLayer)
            or layer.input_order is not None
            or hidden.dtype not in VALUE_DTYPES
            or weights.dtype not in VALUE_DTYPES
            or index.dtype is not torch.int64
        ):
            return None
        hidden, index, weights = hidden.contiguous(), index.contiguous(), weights.contiguous()
        out = torch.empty_like(hidden)
        active = self._experts.run(
            self._native(layer, activation), num_tokens, index.shape[1],
            hidden.dtype is torch.bfloat16, hidden.data_ptr(), index.data_ptr(),
            weights.dtype is torch.bfloat16, weights.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out, active

    def _native(self, layer: PackedLayer, activation: NativeActivation) -> Any:
        known = self._layers.get(layer.layer)
        if known is not None and known[0] is layer and known[1] is activation:
            return known[2]
        native = _native.RoutedLayer(
            native_layout(layer.layout), activation.kind, activation.alpha, activation.limit,
            activation.offset, layer.arrivals.num_experts, layer.buffers.data_ptr(),
            layer.layout.num_bytes,
        )  # fmt: skip
        self._layers[layer.layer] = layer, activation, native
        return native

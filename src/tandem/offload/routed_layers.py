"""Steps of few tokens whose experts all run on the CPU: sorted, computed and added in one call.

Where the kernels know the layer's format and the model's activation; the rest goes the long way.
"""

from typing import Any

import torch
from torch import Tensor

from tandem.kernels import _native
from tandem.kernels.dense import VALUE_DTYPES
from tandem.kernels.native import NativeExperts, native_layout
from tandem.offload.batch import ExpertFunctions
from tandem.offload.host_store import HostLayer
from tandem.offload.packed_layer import PackedLayer

MAX_TOKENS = 64  # more are a prompt's, where sorting in Python costs nothing


class RoutedLayers:
    """The layers of a store as the native call takes them."""

    def __init__(self, native: NativeExperts) -> None:
        """Compute with the threads of `native`, which must be idle."""
        self._experts = _native.RoutedExperts(native._engine)
        self._layers: dict[int, tuple[ExpertFunctions, Any]] = {}

    def run(
        self,
        layer: HostLayer,
        functions: ExpertFunctions,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
    ) -> tuple[Tensor, int] | None:
        """Return the layer's result and how many experts were active; None if it cannot."""
        num_tokens = len(hidden)
        if (
            num_tokens > MAX_TOKENS
            or functions.native is None
            or functions.post_norm is not None
            or not isinstance(layer, PackedLayer)
            or hidden.dtype not in VALUE_DTYPES
            or weights.dtype not in VALUE_DTYPES
            or index.dtype is not torch.int64
        ):
            return None
        hidden, index, weights = hidden.contiguous(), index.contiguous(), weights.contiguous()
        out = torch.empty_like(hidden)
        active = self._experts.run(
            self._native(layer, functions), num_tokens, index.shape[1],
            hidden.dtype is torch.bfloat16, hidden.data_ptr(), index.data_ptr(),
            weights.dtype is torch.bfloat16, weights.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out, active

    def _native(self, layer: PackedLayer, functions: ExpertFunctions) -> Any:
        known = self._layers.get(layer.layer)
        if known is not None and known[0] is functions:
            return known[1]
        activation = functions.native
        assert activation is not None
        native = _native.RoutedLayer(
            native_layout(layer.layout), activation.kind, activation.alpha, activation.limit,
            activation.offset, layer.arrivals.num_experts, layer.buffers.data_ptr(),
            layer.layout.num_bytes,
        )  # fmt: skip
        self._layers[layer.layer] = functions, native
        return native

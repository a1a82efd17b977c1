"""Packed layers in the form that native code takes: one call per batch, or per layer.

Only formats and activations that the kernels support have this form; others are computed in torch,
which is slower.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.experts.execution.batch import ExpertBatch, ExpertFunctions, RoutedCall
from tandem.experts.store.host_store import HostLayer
from tandem.experts.store.layer_slots import LayerSlots
from tandem.experts.store.packed_layer import PackedLayer
from tandem.kernels import _native
from tandem.kernels.native import TOKEN_DTYPES, native_layout


def native_layer(layer: HostLayer, functions: ExpertFunctions) -> _native.RoutedLayer | None:
    """Return a layer in the form that native code takes; None if kernels do not support it."""
    activation = functions.native
    if activation is None or not isinstance(layer, PackedLayer):
        return None
    slots = () if layer.slots is None else (layer.slots.native, layer.slots.number)
    return _native.RoutedLayer(
        native_layout(layer.layout), activation.kind, activation.alpha, activation.limit,
        activation.offset, layer.buffers, *slots,
    )  # fmt: skip


def can_run_steps(layer: HostLayer, functions: ExpertFunctions) -> bool:
    """Tell whether native code can compute a layer from the router's choice to the sum.

    It cannot apply a norm after an expert, or reorder inputs for activation order.
    """
    return functions.post_norm is None and layer.input_order is None


def can_read(call: RoutedCall) -> bool:
    """Tell whether native code can read the dtypes of a call's tensors.

    The tensors need not be contiguous.
    """
    _, hidden, index, weights = call
    return (
        hidden.dtype in TOKEN_DTYPES
        and weights.dtype in TOKEN_DTYPES
        and index.dtype is torch.int64
    )


class _Prepared(NamedTuple):
    """A layer's native form, and the state of the layer from which it was made."""

    layer: HostLayer
    slots: LayerSlots | None
    functions: ExpertFunctions
    native: _native.RoutedLayer | None
    runs_steps: bool

    def is_of(self, layer: HostLayer, functions: ExpertFunctions) -> bool:
        """Tell whether `native` was made from this layer in its present state."""
        slots = layer.slots if isinstance(layer, PackedLayer) else None
        return self.layer is layer and self.slots is slots and self.functions is functions


class RoutedLayers:
    """The layers of a store in native form, each prepared when first used."""

    def __init__(self, engine: _native.ExpertEngine) -> None:
        """Compute with the threads of `engine`, which must be idle at each call."""
        self._engine = engine
        self._run = _native.RoutedExperts(engine).run
        self._layers: dict[int, _Prepared] = {}

    def start_batch(
        self, batch: ExpertBatch, addresses: Sequence[int] | None
    ) -> _native.StartedBatch | None:
        """Start filling the rows of a batch on the threads; its tensors must live until `finish`.

        Weights are at `addresses`, or in the host store if `addresses` is None. Returns None,
        without effect, if the kernels do not support the layer.
        """
        native = self._prepared(batch.layer, batch.functions).native
        if native is None:
            return None
        hidden, rows, tokens = batch.hidden, batch.side.rows, batch.tokens
        hidden = hidden.contiguous() if hidden.dtype in TOKEN_DTYPES else batch.hidden_fp32
        try:
            return _native.StartedBatch(
                self._engine, native,
                batch.experts if addresses is None else addresses, addresses is not None,
                batch.begin, tokens, batch.first_token, hidden, rows,
            )  # fmt: skip
        except ValueError as error:  # indices of routed tokens, experts or tokens are out of range
            raise ModelError(f"the routing of a layer is damaged: {error}") from error

    def run_directly(
        self, layer: HostLayer, functions: ExpertFunctions, call: RoutedCall
    ) -> tuple[Tensor, int] | None:
        """Compute a layer call on the CPU; return its result and the number of active experts.

        Native code sorts the tokens, computes every expert and sums. Returns None if the kernels
        do not support the layer or the call.
        """
        native = self._prepared(layer, functions)
        if native.native is None or not native.runs_steps or not can_read(call):
            return None
        hidden, index, weights = [tensor.contiguous() for tensor in call.tensors]
        out = torch.empty_like(hidden)
        return out, self._run(native.native, hidden, index, weights, out)

    def _prepared(self, layer: HostLayer, functions: ExpertFunctions) -> _Prepared:
        known = self._layers.get(layer.layer)
        if known is None or not known.is_of(layer, functions):
            native, runs_steps = native_layer(layer, functions), can_run_steps(layer, functions)
            slots = layer.slots if isinstance(layer, PackedLayer) else None
            known = _Prepared(layer, slots, functions, native, runs_steps)
            self._layers[layer.layer] = known
        return known

"""A layer's experts straight from the router's choice, as an operation of a recorded step.

Where nothing is planned (every expert on the CPU) and the kernels know the format and the
activation; the executor does everything else.
"""

from typing import Any

import torch
from torch import Tensor

from tandem.hf.program import NativeCall, Report, require_contiguous
from tandem.kernels import _native
from tandem.kernels.dense import VALUE_DTYPES, CpuThreads
from tandem.kernels.native import native_layout
from tandem.offload.batch import ExpertFunctions
from tandem.offload.events import LayerExecuted
from tandem.offload.executor import CpuExecutor
from tandem.offload.packed_layer import PackedLayer

_MAX_TOKENS = 64  # more are a prompt's, where sorting in Python costs nothing


def routed_call(
    threads: CpuThreads,
    execute: Any,
    layer_number: int,
    functions: ExpertFunctions,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
) -> NativeCall | None:
    """Return the call (hidden, index, weights) for tensors like these; None if there is none.

    `execute` is the executor's method that did it when the step was recorded.
    """
    executor = getattr(execute, "__self__", None)
    if type(executor) is not CpuExecutor:
        return None
    layer, activation = executor.store[layer_number], functions.native
    if not isinstance(layer, PackedLayer) or layer.input_order is not None:
        return None
    if activation is None or functions.post_norm is not None:
        return None
    tensors = (hidden, index, weights)
    if not (
        hidden.dtype in VALUE_DTYPES
        and weights.dtype in VALUE_DTYPES
        and index.dtype == torch.int64
        and all(x.is_contiguous() for x in tensors)
        and len(hidden) <= _MAX_TOKENS
    ):
        return None
    native = _native.RoutedLayer(
        native_layout(layer.layout),
        activation.kind,
        activation.alpha,
        activation.limit,
        activation.offset,
        layer.arrivals.num_experts,
        layer.buffers.data_ptr(),
        layer.layout.num_bytes,
    )
    return _call(threads, executor, layer, native)


def _call(
    threads: CpuThreads, executor: CpuExecutor, layer: PackedLayer, native: _native.RoutedLayer
) -> NativeCall:
    listeners = executor.listeners

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> Report:
        (hidden, index, weights), (out,) = inputs, outputs
        require_contiguous(hidden, index, weights)
        number = program.add_experts(
            native, index.shape[0], index.shape[1], hidden.dtype == torch.bfloat16,
            hidden.data_ptr(), index.data_ptr(), weights.dtype == torch.bfloat16,
            weights.data_ptr(), out.data_ptr(),
        )  # fmt: skip

        def report() -> None:
            if listeners:
                _report(executor, layer, index, program.num_active(number))

        return report

    return NativeCall(add, threads)


def _report(executor: CpuExecutor, layer: PackedLayer, chosen: Tensor, num_active: int) -> None:
    event = LayerExecuted(
        layer=layer.layer,
        num_tokens=len(chosen),
        num_active_experts=num_active,
        num_expert_rows=chosen.numel(),
        touched_bytes=num_active * layer.layout.num_bytes,
        chosen=chosen,
    )
    for listener in executor.listeners:
        listener(event)

"""A layer's experts straight from the router's choice, as an operation of a recorded step.

Where nothing is planned (every expert on the CPU) and the kernels know the format and the
activation; the executor does everything else.
"""

from typing import Any

import torch
from torch import Tensor

from tandem.decode.recording.program import NativeCall, Report, require_contiguous
from tandem.experts.execution.batch import ExpertFunctions
from tandem.experts.execution.executor import CpuExecutor
from tandem.experts.execution.routed_layers import can_read, can_run_steps, native_layer
from tandem.experts.store.host_store import HostLayer
from tandem.experts.tracing.forced_routing import ForcedRouting
from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads


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
    forced = executor if isinstance(executor, ForcedRouting) else None
    if forced is not None:
        executor = forced.inner
        index, weights = forced.choices(layer_number, hidden.shape[0])
    if type(executor) is not CpuExecutor:
        return None
    layer = executor.store[layer_number]
    native = native_layer(layer, functions)
    tensors = (hidden, index, weights)
    if native is None or not can_run_steps(layer, functions) or not can_read(*tensors):
        return None
    if not all(x.is_contiguous() for x in tensors):
        return None
    return _call(threads, executor, layer, native, (index, weights) if forced else None)


def _call(
    threads: CpuThreads,
    executor: CpuExecutor,
    layer: HostLayer,
    native: _native.RoutedLayer,
    forced: tuple[Tensor, Tensor] | None,
) -> NativeCall:
    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> Report:
        (hidden, *choice), (out,) = inputs, outputs
        index, weights = forced or choice
        require_contiguous(hidden, index, weights)
        number = program.add_experts(
            native, index.shape[0], index.shape[1], hidden.dtype == torch.bfloat16,
            hidden.data_ptr(), index.data_ptr(), weights.dtype == torch.bfloat16,
            weights.data_ptr(), out.data_ptr(),
        )  # fmt: skip

        def report() -> None:
            if executor.listeners:
                executor.report(layer, index, program.num_active(number), index.numel())

        return report

    return NativeCall(add, threads)

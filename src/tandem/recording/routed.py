"""Computes a layer's experts from the router's choice, as one native operation of a recorded step.

This applies to layers without plans (every expert on the CPU) whose format and activation the
kernels support; the executor computes all other layers.
"""

from types import MethodType
from typing import cast

from torch import Tensor

from tandem.experts.execution.batch import ExpertFunctions, RoutedCall
from tandem.experts.execution.executor import DirectCall, Executor
from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads
from tandem.recording.program import NativeCall, Report, require_contiguous

_INDEX = 1  # position of the router's choice among a call's inputs


def routed_call(
    threads: CpuThreads,
    execute: object,
    layer_number: int,
    functions: ExpertFunctions,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
) -> NativeCall | None:
    """Return the native call of a layer's experts, with the inputs (hidden, index, weights).

    Returns None if the kernels do not support the layer. `execute` is the executor's method that
    the recording has called; the tensors are those of the recorded step.
    """
    if not isinstance(execute, MethodType):
        return None
    executor = cast("Executor", execute.__self__)
    direct = executor.direct_call(RoutedCall(layer_number, hidden, index, weights), functions)
    return None if direct is None else _call(threads, direct)


def _call(threads: CpuThreads, direct: DirectCall) -> NativeCall:
    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> Report | None:
        (hidden, *choice), (out,) = inputs, outputs
        index, weights = direct.choice or choice
        require_contiguous(hidden, index, weights)
        reported = direct.report
        if direct.add is not None:
            direct.add(program, (hidden, index, weights, out))
            return None if reported is None else lambda: reported(index, 0)
        number = program.add_experts(direct.layer, hidden, index, weights, out)
        if reported is None:
            return None
        return lambda: reported(index, program.num_active(number))

    return NativeCall(add, threads, () if direct.report is None else (_INDEX,))

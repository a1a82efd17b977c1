"""Sums, products, SiLU and casts of native results: else they would cut a program in two."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tandem.decode.recording.fusion.copies import MAX_DIMENSIONS, can_copy, copy_call, in_four
from tandem.decode.recording.fusion.graph import Found, Graph
from tandem.decode.recording.program import NativeCall, may_alias
from tandem.decode.recording.recorder import Operation, Ref
from tandem.kernels import _native
from tandem.kernels.dense import VALUE_DTYPES, CpuThreads

# The numbers of csrc/rowwise.hpp.
_KINDS = {"add": 0, "mul": 1, "sub": 2, "silu": 3, "sigmoid": 4, "softplus": 5}


def find_elementwise(graph: Graph, threads: CpuThreads) -> Iterator[Found]:
    """Find those that read a native result, or a view of one."""
    native: set[Ref] = set()  # and views of them
    for operation in graph.operations:
        is_native = isinstance(operation.function, NativeCall)
        if not native.isdisjoint(operation.inputs):
            is_native |= may_alias(operation)
            call = _call(graph, operation, threads)
            if call is not None:
                refs = operation.inputs if operation.name in _KINDS else operation.inputs[:1]
                outputs = operation.outputs
                fused = Operation(call, tuple(refs), {}, outputs, operation.name, list(refs))
                yield Found([operation], fused)
                is_native = True
        if is_native:
            native.update(filter(None, operation.outputs))


def _call(graph: Graph, operation: Operation, threads: CpuThreads) -> NativeCall | None:
    if _is_elementwise(graph, operation):
        return _elementwise_call(threads, operation.name, operation.args)
    if _is_cast(graph, operation):
        return copy_call(threads, dim=-1)
    return None


def _is_cast(graph: Graph, operation: Operation) -> bool:
    """Tell whether values become another type and nothing else."""
    if operation.name not in ("to", "type_as", "_to_copy") or operation.has_effects:
        return False
    result = operation.outputs[0]
    if result is None:
        return False
    return can_copy(graph.tensor(operation.args[0])) and can_copy(graph.tensor(result))


def _is_elementwise(graph: Graph, operation: Operation) -> bool:
    """Tell whether it is known, and all tensors are values that broadcast to the result."""
    is_known = operation.name in _KINDS and not operation.kwargs and not operation.has_effects
    result = operation.outputs[0]
    if not is_known or result is None:
        return False
    if not all(isinstance(arg, Ref | float) for arg in operation.args):
        return False
    tensors = [graph.tensor(ref) for ref in (*operation.inputs, result)]
    is_known = all(x.dtype in VALUE_DTYPES for x in tensors)
    return is_known and tensors[-1].dim() <= MAX_DIMENSIONS and isinstance(operation.args[0], Ref)


def _elementwise_call(threads: CpuThreads, name: str, operands: tuple[Any, ...]) -> NativeCall:
    scalar = operands[-1] if isinstance(operands[-1], float) else 0.0
    kind = _KINDS[name]

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        (out,) = outputs
        tensors = [x.expand(out.shape) for x in inputs]
        if all(x.is_contiguous() for x in tensors):  # one long row
            tensors, out = [x.reshape(-1) for x in tensors], out.view(-1)
        a, b = tensors[0], tensors[1] if len(tensors) == 2 else None
        program.add_elementwise(
            kind, in_four(out.shape, 1),
            a.dtype == torch.bfloat16, a.data_ptr(), in_four(a.stride(), 0),
            b is not None and b.dtype == torch.bfloat16, 0 if b is None else b.data_ptr(),
            in_four(() if b is None else b.stride(), 0), scalar,
            out.dtype == torch.bfloat16, out.data_ptr(),
        )  # fmt: skip

    return NativeCall(add, threads)

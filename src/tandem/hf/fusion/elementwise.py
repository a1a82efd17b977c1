"""Sums, products, SiLU and casts of native results: else they would cut a program in two."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tandem.hf.fusion.copies import can_copy, copy_call
from tandem.hf.fusion.graph import Found, Graph
from tandem.hf.program import NativeCall, may_alias, require_contiguous
from tandem.hf.step_recorder import Operation, Ref
from tandem.kernels import _native
from tandem.kernels.dense import VALUE_DTYPES, CpuThreads

# The numbers of csrc/rowwise.hpp.
_KINDS = {"add": 0, "mul": 1, "silu": 2}


def find_elementwise(graph: Graph, threads: CpuThreads) -> Iterator[Found]:
    """Find those whose operands have the result's shape and are, one at least, native results."""
    native: set[Ref] = set()  # and views of them
    for operation in graph.operations:
        is_native = isinstance(operation.function, NativeCall)
        if not native.isdisjoint(operation.inputs):
            is_native |= may_alias(operation)
            call = _call(graph, operation, threads)
            if call is not None:
                args = operation.args if operation.name in _KINDS else operation.args[:1]
                fused = Operation(call, args, {}, operation.outputs, operation.name, list(args))
                yield Found([operation], fused)
                is_native = True
        if is_native:
            native.update(filter(None, operation.outputs))


def _call(graph: Graph, operation: Operation, threads: CpuThreads) -> NativeCall | None:
    if _is_elementwise(graph, operation):
        return _elementwise_call(threads, _KINDS[operation.name])
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
    """Tell whether it is known, and all tensors have one shape and dtype and no gaps."""
    is_known = operation.name in _KINDS and not operation.kwargs and not operation.has_effects
    if not is_known or not all(isinstance(arg, Ref) for arg in operation.args):
        return False
    refs = (*operation.args, *filter(None, operation.outputs))
    tensors = [graph.tensor(ref) for ref in refs]
    is_alike = len({(x.shape, x.dtype) for x in tensors}) == 1
    return is_alike and tensors[0].dtype in VALUE_DTYPES and all(x.is_contiguous() for x in tensors)


def _elementwise_call(threads: CpuThreads, kind: int) -> NativeCall:
    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        a, b, out = inputs[0], inputs[-1], outputs[0]
        require_contiguous(a, b)
        program.add_elementwise(
            kind, a.numel(), a.dtype == torch.bfloat16, a.data_ptr(), b.data_ptr(), out.data_ptr()
        )

    return NativeCall(add, threads)

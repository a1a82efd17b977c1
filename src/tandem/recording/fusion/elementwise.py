"""Elementwise operations: sums, activations, comparisons, selections, casts."""

import torch
from torch import Tensor

from tandem.kernels import _native
from tandem.recording.fusion.graph import Graph
from tandem.recording.fusion.views import (
    ELEMENT_DTYPES,
    FLOAT_DTYPES,
    WRITTEN_DTYPES,
    Small,
    add_combination,
)
from tandem.recording.recorder import Operation, Ref

# torch's names, in the order of ElementwiseKind in C++.
_ONE = (
    *("copy", "silu", "sigmoid", "softplus", "gelu", "gelu_tanh", "relu", "exp", "log", "log1p"),
    *("sin", "cos", "tanh", "neg", "abs", "sqrt", "rsqrt", "reciprocal", "floor", "logical_not"),
)
_TWO = (
    *("add", "mul", "sub", "div", "maximum", "minimum", "pow", "gt", "ge", "lt", "le", "eq", "ne"),
    *("logical_and", "logical_or"),
)
KINDS = {name: number for number, name in enumerate((*_ONE, *_TWO, "where", "clamp"))}
_SAME = {"divide": "div", "multiply": "mul", "negative": "neg"}
# For boolean tensors.
_LOGICAL = {
    **{"bitwise_not": "logical_not", "bitwise_and": "logical_and", "__and__": "logical_and"},
    **{"bitwise_or": "logical_or", "__or__": "logical_or"},
}
CASTS = ("to", "type_as", "_to_copy")

# A number, or a tensor of the recording.
_Operand = Ref | float


def match_elementwise(graph: Graph, operation: Operation) -> Small | None:
    """Return the native form of an elementwise operation, also in place; None for other operations.

    The operands may broadcast to the result.
    """
    result = operation.outputs[0]
    is_in_place = operation.has_effects
    if result is None or len(operation.outputs) != 1:
        return None
    if is_in_place and (not operation.name.endswith("_") or operation.args[0] != result):
        return None
    named = kind_and_operands(graph, operation)
    if named is None or graph.tensor(result).dtype not in WRITTEN_DTYPES:
        return None
    kind, values = named
    found = [_operand(graph, value, graph.tensor(result)) for value in values]
    operands = [operand for operand in found if operand is not None]
    if len(operands) < len(values):
        return None
    return _small(KINDS[kind], operands, result if is_in_place else None)


def match_cast(graph: Graph, operation: Operation) -> Small | None:
    """Return the native form of a dtype conversion into a new tensor; None for other operations."""
    if operation.name not in CASTS or operation.has_effects:
        return None
    source, result = operation.args[0], operation.outputs[0]
    if result is None or graph.tensor(result).dtype not in WRITTEN_DTYPES:
        return None
    if graph.tensor(source).dtype not in ELEMENT_DTYPES or graph.shares_memory(source, result):
        return None
    return _small(KINDS["copy"], [source], None)


def _small(kind: int, operands: list[_Operand], target: Ref | None) -> Small:
    refs = [operand for operand in operands if isinstance(operand, Ref)]

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        rest = iter(inputs)
        read = [next(rest) if isinstance(x, Ref) else float(x) for x in operands]
        add_combination(program, kind, read, outputs[0])

    return Small([*refs, *([target] if target else [])], add)


def _operand(graph: Graph, value: object, result: Tensor) -> _Operand | None:
    """Return an argument as an operand, a tensor's `Ref` or a number; None if it is not supported.

    An fp32 tensor beside a bf16 result is supported only as a constant scalar, which is rounded.
    """
    if not isinstance(value, Ref):
        return float(value) if isinstance(value, int | float) else None
    x = graph.tensor(value)
    if x.dtype not in ELEMENT_DTYPES:
        return None
    is_rounded = x.dtype == torch.float32 and result.dtype == torch.bfloat16
    if not is_rounded:
        return value
    # A number in a scalar tensor is first rounded to the other operand's type.
    return float(x.to(result.dtype)) if x.dim() == 0 and value.number in graph.fixed else None


def kind_and_operands(graph: Graph, operation: Operation) -> tuple[str, list[object]] | None:
    """Return an operation's kind and operands; None if its kind or arguments are not supported."""
    name = operation.name.removesuffix("_") if operation.has_effects else operation.name
    args: list[object] = list(operation.args)
    kwargs = operation.kwargs
    first = args[0] if args else None
    is_logical = isinstance(first, Ref) and graph.tensor(first).dtype == torch.bool
    name = _SAME.get(name, _LOGICAL.get(name, name) if is_logical else name)
    if name == "gelu":
        is_tanh = kwargs.get("approximate", args[1] if len(args) > 1 else "none") == "tanh"
        return ("gelu_tanh" if is_tanh else "gelu"), args[:1]
    if name.startswith("clamp"):
        return _clamp(name, args, kwargs)
    if kwargs:
        return None
    if name == "softplus":
        return (name, args[:1]) if args[1:] in ([], [1, 20]) else None
    if name == "square" or (name == "pow" and args[1] == 2):
        return "mul", [args[0], args[0]]
    if name == "rsub" and len(args) == 2:
        return "sub", args[::-1]
    if name == "masked_fill":
        return "where", [args[1], args[2], args[0]]
    if name == "where":
        return (name, args) if len(args) == 3 else None
    expected = 1 if name in _ONE else 2 if name in _TWO else 0
    return (name, args) if name != "copy" and len(args) == expected else None


def _clamp(
    name: str, args: list[object], kwargs: dict[str, object]
) -> tuple[str, list[object]] | None:
    bounds = [*args[1:], *[None] * (3 - len(args))]
    if name == "clamp_max":
        bounds = [None, args[1] if len(args) > 1 else kwargs.get("max")]
    elif name not in ("clamp", "clamp_min"):
        return None
    low, high = bounds
    low, high = kwargs.get("min", low), kwargs.get("max", high)
    lowest = -float("inf") if low is None else low
    return "clamp", [args[0], lowest, float("inf") if high is None else high]


def are_floats(*tensors: Tensor) -> bool:
    """Tell whether all tensors are fp32 or bf16."""
    return all(x.dtype in FLOAT_DTYPES for x in tensors)

"""Matches operations along one dimension: sums, means, extremes, top-k, softmax, layer norms."""

import torch
from torch import Tensor

from tandem.kernels import _native
from tandem.recording.fusion.elementwise import are_floats
from tandem.recording.fusion.graph import Graph
from tandem.recording.fusion.routers import takes_largest
from tandem.recording.fusion.views import MAX_DIMENSIONS, Small, dense
from tandem.recording.recorder import Operation, Ref

# The numbers of ReductionKind in C++.
_KINDS = {"sum": 0, "mean": 1, "amax": 2, "amin": 3, "max": 2, "min": 3, "linalg_vector_norm": 4}


def match_reduction(graph: Graph, operation: Operation) -> Small | None:
    """Return the native form of an operation on floats along one dimension; None for others."""
    source, out = operation.args[0] if operation.args else None, operation.outputs[0]
    if not isinstance(source, Ref) or out is None or operation.has_effects:
        return None
    x = graph.tensor(source)
    if not are_floats(x, graph.tensor(out)) or x.dim() == 0:
        return None
    if operation.name in _KINDS:
        return _match_reduction(operation, x)
    if x.dim() > MAX_DIMENSIONS:
        return None
    if operation.name == "softmax" and is_last(operation.args[1], x):
        return Small([source], add_softmax)
    if operation.name == "topk":
        return _match_greatest(operation, x)
    if operation.name == "layer_norm":
        return _match_layer_norm(graph, operation, x)
    return None


def is_last(dim: object, x: Tensor) -> bool:
    """Tell whether `dim` is a tensor's last dimension."""
    return isinstance(dim, int) and dim % x.dim() == x.dim() - 1


def _match_reduction(operation: Operation, x: Tensor) -> Small | None:
    args = list(operation.args[1:])
    if operation.name == "linalg_vector_norm" and args.pop(0) != 2:
        return None
    dims = args[0] if args else operation.kwargs.get("dim")
    if isinstance(dims, list | tuple) and len(dims) == 1:
        dims = dims[0]
    is_two = operation.name in ("max", "min")
    if not isinstance(dims, int) or is_two != (len(operation.outputs) == 2):
        return None
    if operation.kwargs.keys() - {"dim", "keepdim", "dtype"}:
        return None
    dim, kind = dims, _KINDS[operation.name]
    if _put_last(x, dim).dim() > MAX_DIMENSIONS:
        return None

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        add_reduction(program, kind, dim, inputs[0], *outputs)

    return Small([operation.args[0]], add)


def add_reduction(
    program: _native.Program,
    kind: int,
    dim: int,
    x: Tensor,
    out: Tensor,
    index: Tensor | None = None,
) -> None:
    """Add a reduction of `x` along `dim` to a program.

    `kind` is a number of C++'s ReductionKind. `index` receives the positions of extremes.
    """
    program.add_reduction(kind, _put_last(x, dim), dense(out), index)


def _put_last(x: Tensor, dim: int) -> Tensor:
    """Return a view of `x` with dimension `dim` last; other dimensions of size 1 are dropped."""
    others = [d for d in range(x.dim()) if d != dim % x.dim() and x.shape[d] != 1]
    shape = [x.shape[d] for d in (*others, dim)]
    return x.as_strided(shape, [x.stride(d) for d in (*others, dim)], x.storage_offset())


def add_softmax(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Add a softmax over the last dimension to a program: inputs [x], outputs [result]."""
    program.add_softmax(inputs[0], dense(outputs[0]))


def _match_greatest(operation: Operation, x: Tensor) -> Small | None:
    if operation.kwargs or not takes_largest(operation, x.dim()):
        return None
    count: int = operation.args[1]

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        add_greatest(program, inputs[0], count, *outputs)

    return Small([operation.args[0]], add)


def add_greatest(
    program: _native.Program, x: Tensor, count: int, values: Tensor, index: Tensor
) -> None:
    """Add a top-k of `x` over its last dimension to a program; the greatest value comes first."""
    program.add_greatest(x, dense(values), index)


def _match_layer_norm(graph: Graph, operation: Operation, x: Tensor) -> Small | None:
    source, shape, *rest = operation.args
    weight, bias, eps = (*rest, *(None, None, 1e-5)[len(rest) :])[:3]
    refs = [ref for ref in (weight, bias) if ref is not None]
    if list(shape) != [x.shape[-1]] or any(r.number not in graph.fixed for r in refs):
        return None
    factors, shifts = (
        None if ref is None else graph.tensor(ref).to(torch.float32).contiguous()
        for ref in (weight, bias)
    )

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        program.add_layer_norm(inputs[0], eps, factors, shifts, dense(outputs[0]))

    return Small([source], add)

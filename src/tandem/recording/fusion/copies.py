"""Copies: concatenation, repetition, changes of layout, and filled memory."""

from collections.abc import Callable, Sequence

from torch import Tensor

from tandem.kernels import _native
from tandem.recording.fusion.elementwise import KINDS
from tandem.recording.fusion.graph import Graph
from tandem.recording.fusion.views import (
    ELEMENT_DTYPES,
    WRITTEN_DTYPES,
    Small,
    add_combination,
)
from tandem.recording.recorder import Operation, Ref

_COPY = KINDS["copy"]
_LAYOUTS = ("reshape", "flatten", "contiguous", "clone", "_unsafe_view", "repeat")
_EMPTY = ("new_empty", "empty", "empty_like")
# Function that creates a tensor -> the value that fills it.
_FILLINGS = {"zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "ones_like": 1.0, "new_ones": 1.0}


def match_copy(graph: Graph, operation: Operation) -> Small | None:
    """Return the native form of a copying or filling operation; None for other operations."""
    result = operation.outputs[0] if len(operation.outputs) == 1 else None
    if result is None or graph.tensor(result).dtype not in ELEMENT_DTYPES:
        return None
    name, args = operation.name, operation.args
    if name in ("cat", "concat", "concatenate", "stack"):
        return _match_joined(graph, operation, result)
    if name in _LAYOUTS:
        is_view = graph.shares_memory(args[0], result)
        is_copy = not is_view and _is_known(graph, args[0], result)
        return _moved(args[0], _repeated if name == "repeat" else _laid_out) if is_copy else None
    if name == "repeat_interleave":
        return _match_interleaved(graph, operation, result)
    if name == "copy_" and _is_known(graph, args[1], result):
        return Small([args[1], args[0]], _add_copy)
    if name in _EMPTY:
        return Small([], lambda *_: None)
    if name in _FILLINGS:
        return Small([], _constant(_FILLINGS[name]))
    return None


def _is_known(graph: Graph, ref: object, result: Ref) -> bool:
    """Tell whether the kernels can convert a tensor to the result's dtype while copying.

    Integers can be copied, but not converted to another integer dtype.
    """
    if not isinstance(ref, Ref):
        return False
    source, target = graph.tensor(ref).dtype, graph.tensor(result).dtype
    return source in ELEMENT_DTYPES and (source == target or target in WRITTEN_DTYPES)


def _match_joined(graph: Graph, operation: Operation, result: Ref) -> Small | None:
    sources: list[Ref] = list(operation.args[0])
    dim = operation.args[1] if len(operation.args) > 1 else operation.kwargs.get("dim", 0)
    out = graph.tensor(result)
    if not all(_is_known(graph, ref, result) for ref in sources):
        return None
    if operation.name == "stack":
        return _filled(sources, lambda out: out.unbind(dim))
    sizes = [graph.tensor(ref).shape[dim] for ref in sources if graph.tensor(ref).dim()]
    if sum(sizes) != out.shape[dim] or any(graph.tensor(r).dim() != out.dim() for r in sources):
        return None
    return _filled(sources, lambda out: out.split(sizes, dim))


def _match_interleaved(graph: Graph, operation: Operation, result: Ref) -> Small | None:
    source, *rest = operation.args
    count = rest[0] if rest else operation.kwargs.get("repeats")
    dim = rest[1] if len(rest) > 1 else operation.kwargs.get("dim")
    if not (isinstance(count, int) and isinstance(dim, int) and _is_known(graph, source, result)):
        return None
    dim %= graph.tensor(source).dim()

    def repeated(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        return x.unsqueeze(dim + 1), out.unflatten(dim, (x.shape[dim], count))

    return _moved(source, repeated)


def _filled(sources: Sequence[Ref], parts_of: Callable[[Tensor], Sequence[Tensor]]) -> Small:
    """Return the native form that copies each source to its part of the result.

    `parts_of` returns the parts, as views of the result, in the order of the sources.
    """

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        for x, part in zip(inputs, parts_of(outputs[0]), strict=True):
            add_combination(program, _COPY, [x], part)

    return Small(sources, add)


def _moved(source: Ref, views_of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Small:
    """Return the native form that copies a source to a result.

    `views_of` returns a view of each; the source's view must broadcast to the result's.
    """

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        x, out = views_of(inputs[0], outputs[0])
        add_combination(program, _COPY, [x], out)

    return Small([source], add)


def _laid_out(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    return x, out.view(x.shape)


def _repeated(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of `x` and `out` that have two dimensions for each dimension of `out`.

    The first of the two counts the repetitions (1 in `x`), the second has the size of `x`.
    """
    lead = out.dim() - x.dim()
    shape = (*[1] * lead, *x.shape)
    pairs = [(o // s if s else 0, s) for o, s in zip(out.shape, shape, strict=True)]
    wide = [size for _, size in pairs for size in (1, size)]
    return x.reshape(wide), out.view([size for pair in pairs for size in pair])


def _add_copy(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    add_combination(program, _COPY, inputs[:1], outputs[0])


def _constant(
    value: float,
) -> Callable[[_native.Program, list[Tensor], list[Tensor]], None]:
    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        add_combination(program, _COPY, [value], outputs[0])

    return add

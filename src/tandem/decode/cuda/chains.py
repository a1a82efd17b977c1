"""Fuses chains of small elementwise operations of a recorded step into one launch on a GPU.

Such chains are activations, gates and decays. A value that only one operation reads is computed in
the same launch as that operation.
"""

from collections.abc import Iterator
from typing import TypeGuard

import torch
from torch import Tensor

from tandem.recording.fusion.elementwise import CASTS, kind_and_operands
from tandem.recording.fusion.graph import Found, Graph
from tandem.recording.recorder import Operation, Ref


def find_chains(graph: Graph) -> Iterator[Found]:
    """Yield chains of two or more elementwise operations; the chain that ends last comes first."""
    places = {id(operation): place for place, operation in enumerate(graph.operations)}
    taken: set[int] = set()
    for root in reversed(graph.operations):
        if id(root) in taken or _parts(graph, root) is None:
            continue
        group, sources = _grown(graph, root)
        group.sort(key=lambda operation: places[id(operation)])
        if len(group) < 2 or graph.is_written_between(sources, group[0], root):
            continue
        taken |= set(map(id, group))
        yield Found(group, _fused(graph, group, sources))


def _parts(graph: Graph, operation: Operation) -> tuple[str, list[Ref | float]] | None:
    """Return an operation's kind and operands; None if it cannot be part of a chain."""
    from tandem.triton_kernels.chains import KINDS, dtype_code

    result = operation.outputs[0] if len(operation.outputs) == 1 else None
    if result is None or operation.has_effects or dtype_code(graph.tensor(result).dtype) is None:
        return None
    if operation.name in CASTS:
        source = operation.args[0]
        is_copy = isinstance(source, Ref) and not graph.shares_memory(source, result)
        found: tuple[str, list[object]] | None = ("copy", [source]) if is_copy else None
    else:
        found = kind_and_operands(graph, operation)
    if found is None or found[0] not in KINDS:
        return None
    operands = [operand for operand in found[1] if _is_operand(operand, graph)]
    return (found[0], operands) if len(operands) == len(found[1]) else None


def _is_operand(value: object, graph: Graph) -> TypeGuard[Ref | float]:
    from tandem.triton_kernels.chains import dtype_code

    if isinstance(value, Ref):
        return dtype_code(graph.tensor(value).dtype) is not None
    return isinstance(value, int | float) and not isinstance(value, bool)


def _grown(graph: Graph, root: Operation) -> tuple[list[Operation], list[Ref]]:
    """Return the chain that ends with `root`, and the tensors that the chain reads.

    An operation joins the chain if only operations of the chain read its result.
    """
    from tandem.triton_kernels.chains import MOST_SOURCES, MOST_STEPS

    shape = graph.tensor(_result(root)).shape
    group, sources = [root], _tensors(graph, root)
    if not _fit(graph, sources, shape):
        return group, sources
    has_grown = True
    while has_grown and len(group) < MOST_STEPS:
        has_grown = False
        for source in sources:
            maker = graph.maker.get(source)
            if maker is None or any(user not in group for user in graph.users[source]):
                continue
            if _parts(graph, maker) is None:
                continue
            others = [other for other in sources if other != source]
            new = list(dict.fromkeys([*others, *_tensors(graph, maker)]))
            if len(new) <= MOST_SOURCES and _fit(graph, new, shape):
                group, sources, has_grown = [*group, maker], new, True
                break
    return group, sources


def _result(operation: Operation) -> Ref:
    (result,) = operation.outputs
    assert result is not None
    return result


def _tensors(graph: Graph, operation: Operation) -> list[Ref]:
    parts = _parts(graph, operation)
    assert parts is not None
    return list(dict.fromkeys(x for x in parts[1] if isinstance(x, Ref)))


def _fit(graph: Graph, sources: list[Ref], shape: torch.Size) -> bool:
    """Tell whether the kernel can read each of `sources`, broadcast to `shape`.

    False if there are none, or `shape` has no dimensions.
    """
    from tandem.triton_kernels.chains import strides_in

    return (
        bool(sources)
        and bool(shape)
        and all(strides_in(graph.tensor(source), shape) is not None for source in sources)
    )


def _fused(graph: Graph, group: list[Operation], sources: list[Ref]) -> Operation:
    from tandem.triton_kernels.chains import KINDS, Chain, chain, dtype_code

    parts = [(_parts(graph, operation) or ("", [])) for operation in group]
    numbers = [float(x) for _, operands in parts for x in operands if not isinstance(x, Ref)]
    numbers = list(dict.fromkeys(numbers))
    made = [_result(operation) for operation in group]
    place: dict[object, int] = {
        value: number for number, value in enumerate([*sources, *numbers, *made])
    }
    kinds, first, second, dtypes = [], [], [], []
    for operation, (kind, operands) in zip(group, parts, strict=True):
        at = [place[x if isinstance(x, Ref) else float(x)] for x in operands]
        kinds.append(KINDS[kind])
        first.append(at[0])
        second.append(at[-1])
        dtypes.append(dtype_code(graph.tensor(_result(operation)).dtype) or 0)
    steps = Chain(tuple(kinds), tuple(first), tuple(second), tuple(dtypes), tuple(numbers))
    result = graph.tensor(made[-1])
    shape, dtype = tuple(result.shape), result.dtype

    def call(*tensors: Tensor) -> Tensor:
        return chain(tensors, steps, shape, dtype)

    return Operation(call, tuple(sources), {}, [made[-1]], "chain", list(sources))

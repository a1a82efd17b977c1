"""Calls that are native already, without the Python code around them: dense, attention, experts."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tandem.hf.opaque_calls import ATTENTION, DENSE, EXPERTS, GROUPS, ROWS, SELECTION, STATES
from tandem.kernels import _native
from tandem.kernels.attention import CachedAttention
from tandem.kernels.dense import CpuThreads, DenseWeight
from tandem.kernels.recurrent import LayerState, StateTokens
from tandem.kv_cache.cpu import KvCache
from tandem.kv_cache.index_keys import NewIndexKeys
from tandem.recording.fusion.elementwise import are_floats
from tandem.recording.fusion.graph import Found, Graph
from tandem.recording.program import NativeCall, require_contiguous
from tandem.recording.recorder import Operation
from tandem.recording.routed import routed_call

_MAX_MATRICES = 8  # of one call


def find_dense_groups(graph: Graph, threads: CpuThreads) -> Iterator[Found]:
    """Find packed matrices that read the same input: it is rounded for them once."""
    groups: dict[tuple[Any, ...], list[Operation]] = {}
    for operation in graph.operations:
        if operation.name == DENSE:
            owner, weight, x = operation.args
            key = (x, id(owner), weight.matrix.format, weight.in_features)
            groups.setdefault(key, []).append(operation)
    for group in groups.values():
        yield _dense_group(graph, group[:_MAX_MATRICES])


def _dense_group(graph: Graph, group: list[Operation]) -> Found:
    threads: CpuThreads = group[0].args[0]
    weights: list[DenseWeight] = [operation.args[1] for operation in group]
    source = group[0].args[2]
    outputs = [operation.outputs[0] for operation in group]
    call = _dense_call(threads, weights)
    fused = Operation(call, (source,), {}, outputs, DENSE, [source], returns_sequence=True)
    return Found(_first_last(group), fused)


def _dense_call(threads: CpuThreads, weights: list[DenseWeight]) -> NativeCall:
    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        require_contiguous(inputs[0])
        program.add_dense([weight.native for weight in weights], inputs[0], outputs)

    return NativeCall(add, threads)


def _first_last(group: list[Operation]) -> list[Operation]:
    """Order a group so that the fused call stands where its first operation does."""
    return [*group[1:], group[0]]


def find_group_products(graph: Graph, threads: CpuThreads) -> Iterator[Found]:
    """Find the products of matrices that have an input each."""
    for operation in graph.operations:
        if operation.name == GROUPS:
            owner, x, weights = operation.args
            if graph.tensor(x).stride(-1) == 1:
                call = _groups_call(owner, weights)
                yield Found([operation], Operation(call, (x,), {}, operation.outputs, GROUPS, [x]))


def _groups_call(threads: CpuThreads, weights: list[DenseWeight]) -> NativeCall:
    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        (x,), (out,) = inputs, outputs
        require_contiguous(out)
        program.add_groups([weight.native for weight in weights], x, out)

    return NativeCall(add, threads)


def find_attentions(graph: Graph, threads: CpuThreads) -> Iterator[Found]:
    """Find the attention of one token per row."""
    for operation in graph.operations:
        if operation.name == ATTENTION:
            cache, attention, *refs = operation.args
            tensors = [graph.tensor(ref) for ref in refs]
            if len(cache.positions) == tensors[0].shape[1]:
                if not all(x.stride(-1) == 1 for x in tensors):
                    continue
                call = _attention_call(cache, attention)
                outputs = operation.outputs
                fused = Operation(call, tuple(refs), {}, outputs, "attend", refs, has_effects=True)
                yield Found([operation], fused)


def _attention_call(cache: KvCache, attention: CachedAttention) -> NativeCall:
    """Return the call for tensors (heads, rows, dim), whose last dimension is dense.

    Selected positions (rows, most) may follow them.
    """
    slots, positions = cache.slots, cache.positions_of(attention)

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        (q, k, v, *selected), (out,) = inputs, outputs
        chosen = selected[0] if selected else None
        program.add_attention(attention.native, slots, positions, q, k, v, chosen, out)

    return NativeCall(add, cache.threads)


def find_rows(graph: Graph, threads: CpuThreads) -> Iterator[Found]:
    """Find rows that are read from packed embeddings."""
    for operation in graph.operations:
        if operation.name == ROWS:
            owner, weight, _, numbers = operation.args
            outputs = operation.outputs
            call = _rows_call(owner, weight)
            fused = Operation(call, (numbers,), {}, outputs, ROWS, [numbers])
            yield Found([operation], fused)


def _rows_call(threads: CpuThreads, weight: DenseWeight) -> NativeCall:
    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        (numbers,), (out,) = inputs, outputs
        require_contiguous(numbers)
        program.add_rows(weight.native, numbers, out)

    return NativeCall(add, threads)


def find_states(graph: Graph, threads: CpuThreads) -> Iterator[Found]:
    """Find the steps of convolutions and of linear attention."""
    for operation in graph.operations:
        if operation.name == STATES:
            cache, layer, *refs = operation.args
            outputs = operation.outputs
            call = _state_call(cache, layer)
            fused = Operation(call, tuple(refs), {}, outputs, STATES, refs, has_effects=True)
            yield Found([operation], fused)


def _state_call(cache: KvCache, layer: LayerState) -> NativeCall:
    tokens = StateTokens(cache.slots, cache.positions, have_drafts=True)  # a decode step's

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        layer.add(program, tokens, inputs, outputs[0])

    return NativeCall(add, cache.threads)


def find_selections(graph: Graph, threads: CpuThreads) -> Iterator[Found]:
    """Find what indexers select by the keys of single positions, of one token per slot."""
    for operation in graph.operations:
        if operation.name != SELECTION:
            continue
        cache, new, *tensors = operation.args
        refs = [ref for ref in tensors if ref is not None]
        if new.pool is not None or not are_floats(*(graph.tensor(ref) for ref in refs)):
            continue
        if len(cache.positions) == len(graph.tensor(refs[0])):
            call, outputs = _selection_call(cache, new), operation.outputs
            fused = Operation(call, tuple(refs), {}, outputs, SELECTION, refs, has_effects=True)
            yield Found([operation], fused)


def _selection_call(cache: KvCache, new: NewIndexKeys) -> NativeCall:
    """Return the call for keys (n, dim), queries (n, heads, dim), perhaps weights (n, heads)."""
    slots, positions = cache.slots, cache.positions
    layer, selection = cache.index_keys.native(new.layer), new.selection

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        (key, query, *weights), (out,) = inputs, outputs
        require_contiguous(out)
        weight = weights[0] if weights else None
        program.add_selection(layer, slots, positions, selection.scale, key, query, weight, out)

    return NativeCall(add, cache.threads)


def find_experts(graph: Graph, threads: CpuThreads) -> Iterator[Found]:
    """Find the layers whose experts are one native call; `threads` compute them."""
    for operation in graph.operations:
        if operation.name != EXPERTS:
            continue
        layer, *refs, functions = operation.args
        call = routed_call(
            threads, operation.function, layer, functions, *(graph.tensor(ref) for ref in refs)
        )
        if call is not None:
            outputs = operation.outputs
            fused = Operation(call, tuple(refs), {}, outputs, EXPERTS, refs, has_effects=True)
            yield Found([operation], fused)

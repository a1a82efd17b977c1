"""Replaces recorded calls of native kernels by native operations, without the Python code around.

These are packed matrices and embeddings, attention, states, selections, residual streams, experts.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads, DenseWeight
from tandem.kernels.hyper_connections import add_mix_in
from tandem.kernels.opaque_calls import (
    ATTENTION,
    DENSE,
    EXPERTS,
    GROUPS,
    MIX_IN,
    MIX_OUT,
    ROWS,
    SELECTION,
    STATES,
    WITHOUT_EFFECTS,
)
from tandem.kernels.recurrent import StateTokens
from tandem.kv_cache.attention_call import OptionalTensors
from tandem.recording.fusion.elementwise import are_floats
from tandem.recording.fusion.graph import Found, Graph
from tandem.recording.program import NativeCall, require_contiguous
from tandem.recording.recorder import Operation, Ref
from tandem.recording.routed import routed_call

_MAX_MATRICES = 8  # in one call


def find_dense_groups(graph: Graph) -> Iterator[Found]:
    """Find products of packed matrices with the same input; fused, they round the input once."""
    groups: dict[object, list[Operation]] = {}
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

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        require_contiguous(inputs[0])
        program.add_dense([weight.native for weight in weights], inputs[0], outputs)

    call = NativeCall(add, threads)
    fused = Operation(call, (source,), {}, outputs, DENSE, [source], returns_sequence=True)
    return Found([*group[1:], group[0]], fused)  # the call takes the last one's place


def find_calls(graph: Graph, threads: CpuThreads) -> Iterator[Found]:
    """Find calls of native kernels; `threads` compute experts, other calls bring their threads."""
    for operation in graph.operations:
        match = _MATCHES.get(operation.name)
        found = None if match is None else match(graph, operation, threads)
        if found is not None:
            name = "attend" if operation.name == ATTENTION else operation.name
            fused = Operation(
                found.call, tuple(found.refs), {}, operation.outputs, name, found.refs,
                has_effects=name not in WITHOUT_EFFECTS,
            )  # fmt: skip
            yield Found([operation], fused)


class _Call(NamedTuple):
    call: NativeCall
    refs: list[Ref]
    """The tensors that the call reads."""


def _attention(graph: Graph, operation: Operation, _: CpuThreads) -> _Call | None:
    """Return the native call of a decode step's attention; None if the tensors do not fit it.

    Queries, keys and values must be (heads, n_tokens, dim), contiguous in `dim`. After them, the
    operation may have an `AttentionCall`'s `optional_tensors`.
    """
    cache, attention, *refs = operation.args
    tensors = [graph.tensor(ref) for ref in refs]
    if len(cache.positions) != tensors[0].shape[1] or any(x.stride(-1) != 1 for x in tensors):
        return None
    slots, positions = cache.slots, cache.positions

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        (q, k, v, *more), (out,) = inputs, outputs
        optional = OptionalTensors.of(attention, more)
        program.add_attention(
            attention.native, slots, positions, q, k, v, optional.selected, out,
            optional.compressed, optional.bias_states, optional.sinks,
        )  # fmt: skip

    return _Call(NativeCall(add, cache.threads), refs)


def _states(graph: Graph, operation: Operation, _: CpuThreads) -> _Call:
    """Return the native call that advances a layer's states: convolutions, linear attention."""
    cache, layer, *refs = operation.args
    tokens = StateTokens(cache.slots, cache.positions, have_drafts=True)  # a decode step

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        layer.add(program, tokens, inputs, outputs[0])

    return _Call(NativeCall(add, cache.threads), refs)


def _selection(graph: Graph, operation: Operation, _: CpuThreads) -> _Call | None:
    """Return the native call of an indexer's selection in a decode step; None if it pools keys.

    Keys must be (n_tokens, dim), queries (n_tokens, heads, dim), and weights, if any, (n_tokens,
    heads), in fp32 or bf16; otherwise None.
    """
    cache, new, *tensors = operation.args
    refs = [ref for ref in tensors if ref is not None]
    if new.pool is not None or not are_floats(*(graph.tensor(ref) for ref in refs)):
        return None
    if len(cache.positions) != len(graph.tensor(refs[0])):
        return None
    slots, positions = cache.slots, cache.positions
    layer = cache.index_keys.native(new.layer, new.selection.key_block)
    scale, by_head = new.selection.scale, new.selection.by_head
    blocks = (new.selection.block, new.selection.num_local) if by_head else ()

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        (key, query, *weights), (out,) = inputs, outputs
        require_contiguous(out)
        weight = weights[0] if weights else None
        program.add_selection(layer, slots, positions, scale, key, query, weight, out, *blocks)

    return _Call(NativeCall(add, cache.threads), refs)


def _rows(graph: Graph, operation: Operation, _: CpuThreads) -> _Call:
    """Return the native call that reads rows of a packed embedding."""
    owner, weight, _dtype, numbers = operation.args

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        require_contiguous(*inputs)
        program.add_rows(weight.native, inputs[0], outputs[0])

    return _Call(NativeCall(add, owner), [numbers])


def _groups(graph: Graph, operation: Operation, _: CpuThreads) -> _Call | None:
    """Return the native call of products of packed matrices, each with an input of its own.

    None if the inputs are not contiguous in their last dimension.
    """
    owner, weights, x = operation.args
    if graph.tensor(x).stride(-1) != 1:
        return None

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        require_contiguous(*outputs)
        program.add_groups([weight.native for weight in weights], inputs[0], outputs[0])

    return _Call(NativeCall(add, owner), [x])


def _mix_in(graph: Graph, operation: Operation, _: CpuThreads) -> _Call:
    """Return the native call that computes a layer's input from residual streams."""
    owner, connection, *refs = operation.args

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        require_contiguous(*inputs)
        add_mix_in(program, connection, inputs, outputs)

    return _Call(NativeCall(add, owner), refs)


def _mix_out(graph: Graph, operation: Operation, _: CpuThreads) -> _Call:
    """Return the native call that updates residual streams by a layer's output."""
    owner, *refs = operation.args

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        require_contiguous(*inputs)
        y, weights, streams = inputs
        program.add_mix_out(y, weights, streams, outputs[0])

    return _Call(NativeCall(add, owner), refs)


def _experts(graph: Graph, operation: Operation, threads: CpuThreads) -> _Call | None:
    """Return the native call of a layer's experts; None if the kernels do not support the layer."""
    layer, *refs, functions = operation.args
    tensors = [graph.tensor(ref) for ref in refs]
    call = routed_call(threads, operation.function, layer, functions, *tensors)
    return None if call is None else _Call(call, refs)


_MATCHES: dict[str, Callable[[Graph, Operation, CpuThreads], _Call | None]] = {
    ATTENTION: _attention,
    STATES: _states,
    SELECTION: _selection,
    ROWS: _rows,
    GROUPS: _groups,
    EXPERTS: _experts,
    MIX_IN: _mix_in,
    MIX_OUT: _mix_out,
}

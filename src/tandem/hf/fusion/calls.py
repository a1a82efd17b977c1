"""Calls that are native already, without the Python code around them: dense, attention, experts."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tandem.hf.fusion.graph import Found, Graph
from tandem.hf.kv_cache import KvCache
from tandem.hf.routed import routed_call
from tandem.hf.step_recorder import ATTENTION, DENSE, EXPERTS, Operation
from tandem.kernels.attention import CachedAttention
from tandem.kernels.dense import CpuThreads, DenseWeight

_MAX_MATRICES = 8  # of one call


def find_dense_groups(graph: Graph) -> Iterator[Found]:
    """Find packed matrices that read the same input: it is rounded for them once."""
    groups: dict[tuple[Any, ...], list[Operation]] = {}
    for operation in graph.operations:
        if operation.name == DENSE:
            threads, weight, x = operation.args
            key = (x, id(threads), weight.matrix.format, weight.in_features)
            groups.setdefault(key, []).append(operation)
    for group in groups.values():
        yield _dense_group(graph, group[:_MAX_MATRICES])


def _dense_group(graph: Graph, group: list[Operation]) -> Found:
    threads: CpuThreads = group[0].args[0]
    weights: list[DenseWeight] = [operation.args[1] for operation in group]
    source = group[0].args[2]
    x = graph.tensor(source)
    cols, tokens = weights[0].in_features, x.numel() // weights[0].in_features
    lead, dtype, is_bf16 = tuple(x.shape[:-1]), x.dtype, x.dtype == torch.bfloat16
    natives = tuple([weight.native for weight in weights])
    shapes = [(*lead, weight.out_features) for weight in weights]
    run, empty = threads.dense.run, torch.empty

    def multiply(x: Tensor, keep: Any = (threads, weights)) -> list[Tensor]:
        x = x.contiguous()
        outs = [empty(shape, dtype=dtype) for shape in shapes]
        run(natives, tokens, cols, is_bf16, x.data_ptr(), tuple([out.data_ptr() for out in outs]))
        return outs

    outputs = [operation.outputs[0] for operation in group]
    fused = Operation(multiply, (source,), {}, outputs, DENSE, [source], returns_sequence=True)
    return Found(_first_last(group), fused)


def _first_last(group: list[Operation]) -> list[Operation]:
    """Order a group so that the fused call stands where its first operation does."""
    return [*group[1:], group[0]]


def find_attentions(graph: Graph) -> Iterator[Found]:
    """Find the attention of one token per row."""
    for operation in graph.operations:
        if operation.name == ATTENTION:
            cache, attention, *refs = operation.args
            tensors = [graph.tensor(ref) for ref in refs]
            if len(cache.positions) == tensors[0].shape[1]:
                function = _attention_call(cache, attention, *tensors)
                outputs = operation.outputs
                yield Found(
                    [operation],
                    Operation(function, tuple(refs), {}, outputs, "attend", refs, has_effects=True),
                )


def _attention_call(
    cache: KvCache, attention: CachedAttention, q: Tensor, k: Tensor, v: Tensor
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the call for tensors (heads, rows, dim) of these strides; the last is dense."""
    if not all(x.stride(-1) == 1 for x in (q, k, v)):
        return lambda q, k, v: cache.attend_layer(attention, q, k, v)
    append, attend = cache.threads.attention.append, cache.threads.attention.attend
    layer, count, is_bf16, dtype = attention.native, q.shape[1], q.dtype == torch.bfloat16, q.dtype
    shape = (count, attention.form.num_heads, attention.form.value_dim)
    rows, positions = cache.rows.data_ptr(), cache.positions.data_ptr()
    q_token, q_head = q.stride(1), q.stride(0)
    k_token, k_head, v_token, v_head = k.stride(1), k.stride(0), v.stride(1), v.stride(0)
    empty = torch.empty

    def run(q: Tensor, k: Tensor, v: Tensor, keep: Any = (cache.rows, cache.positions)) -> Tensor:
        append(
            layer, is_bf16, count, rows, positions,
            k.data_ptr(), k_token, k_head, v.data_ptr(), v_token, v_head,
        )  # fmt: skip
        out = empty(shape, dtype=dtype)
        attend(
            layer, is_bf16, count, rows, positions, q.data_ptr(), q_token, q_head, out.data_ptr()
        )
        return out

    return run


def find_experts(graph: Graph, threads: CpuThreads) -> Iterator[Found]:
    """Find the layers whose experts are one native call; `threads` compute them."""
    for operation in graph.operations:
        if operation.name != EXPERTS:
            continue
        layer, *refs, functions = operation.args
        function = routed_call(
            threads, operation.function, layer, functions, *(graph.tensor(ref) for ref in refs)
        )
        if function is not None:
            outputs = operation.outputs
            fused = Operation(function, tuple(refs), {}, outputs, EXPERTS, refs, has_effects=True)
            yield Found([operation], fused)

"""Replaces well-known groups of recorded operations by one native call each.

Groups are known by what they compute, not by the model that they come from. What does not match in
every detail stays as it is; the tape is compared with the model's own step before it is trusted.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tandem.hf.kv_cache import KvCache
from tandem.hf.routed import routed_call
from tandem.hf.step_recorder import Operation, Ref
from tandem.kernels import _native
from tandem.kernels.attention import CachedAttention
from tandem.kernels.dense import VALUE_DTYPES, CpuThreads, DenseWeight, pack_dense
from tandem.kernels.formats.weight_format import find_format

DENSE = "dense"
ATTENTION = "attention"
EXPERTS = "experts"
_MAX_MATRICES = 8
# Routers and the like: their copy in packed form costs no memory worth speaking of.
_SMALL_WEIGHTS = 1 << 21


def fuse(
    operations: list[Operation], tensors: list[Tensor], fixed: set[int], threads: CpuThreads | None
) -> list[Operation]:
    """Return the operations with groups replaced; `fixed` numbers the tensors that never change.

    `threads` compute experts; without them the executor does.
    """
    finders: list[Callable[[_Graph], Iterator[tuple[list[Operation], Operation]]]] = [
        _find_norms,
        _find_rotaries,
        _find_choices,
        _find_attentions,
    ]
    if threads is not None:
        finders.append(functools.partial(_find_experts, threads=threads))
        finders.append(functools.partial(_find_small_linears, threads=threads))
    finders.append(_find_dense_groups)
    for finder in finders:
        graph = _Graph(operations, tensors, fixed)
        for group, fused in finder(graph):
            graph.replace(group, fused)
        operations = graph.result()
    return operations


class _Graph:
    """Operations with who makes and who reads each tensor."""

    def __init__(self, operations: list[Operation], tensors: list[Tensor], fixed: set[int]) -> None:
        self.operations = operations
        self.tensors = tensors
        self.fixed = fixed
        self.maker: dict[Ref, Operation] = {}
        self.users: dict[Ref, list[Operation]] = {}
        for operation in operations:
            for ref in operation.outputs:
                if ref is not None and ref not in operation.inputs:
                    self.maker[ref] = operation
            for ref in set(operation.inputs):
                self.users.setdefault(ref, []).append(operation)
        self._replaced: dict[int, Operation | None] = {}

    def made_by(self, ref: Any, name: str) -> Operation | None:
        """Return the operation of that name that makes a tensor, if that is who does."""
        operation = self.maker.get(ref) if isinstance(ref, Ref) else None
        is_it = operation is not None and operation.name == name and not operation.has_effects
        return operation if is_it else None

    def only_user(self, ref: Ref | None, name: str) -> Operation | None:
        """Return the only operation that reads a tensor, if it has that name."""
        users = self.users.get(ref, []) if ref is not None else []
        return users[0] if len(users) == 1 and users[0].name == name else None

    def tensor(self, ref: Ref) -> Tensor:
        """Return a tensor as it was when it was recorded."""
        return self.tensors[ref.number]

    def replace(self, group: list[Operation], fused: Operation) -> None:
        """Put `fused` where the last of a group stands; leave the others out."""
        if any(id(operation) in self._replaced for operation in group):
            return
        self._replaced |= dict.fromkeys(map(id, group[:-1]))
        self._replaced[id(group[-1])] = fused

    def result(self) -> list[Operation]:
        """Return the operations with the replacements in place."""
        found = (self._replaced.get(id(op), op) for op in self.operations)
        return [operation for operation in found if operation is not None]


def _other(operation: Operation, ref: Ref) -> Any:
    """Return the other argument of a two-argument operation."""
    first, second = operation.args[:2]
    return second if first == ref else first


# ---- root mean square norms ----------------------------------------------------------------------


def _find_norms(graph: _Graph) -> Iterator[tuple[list[Operation], Operation]]:
    for root in graph.operations:
        if root.name == "rsqrt":
            found = _match_norm(graph, root)
            if found is not None:
                yield found


def _match_norm(graph: _Graph, root: Operation) -> tuple[list[Operation], Operation] | None:
    shift = graph.made_by(root.args[0], "add")
    mean = graph.made_by(shift.args[0], "mean") if shift else None
    square = graph.made_by(mean.args[0], "pow") if mean else None
    if not (shift and mean and square) or not isinstance(shift.args[1], float):
        return None
    if mean.args[1:] != ([-1], True) or square.args[1] != 2:
        return None
    wide = square.args[0]
    scaled = graph.only_user(root.outputs[0], "mul")
    if scaled is None or _other(scaled, root.outputs[0]) != wide:  # type: ignore[arg-type]
        return None
    cast = graph.made_by(wide, "to")
    source = cast.args[0] if cast else wide
    chain = [*([cast] if cast else []), square, mean, shift, root, scaled]
    inner = {ref for op in chain[:-1] for ref in op.outputs if ref is not None}
    if any(user not in chain for ref in inner for user in graph.users.get(ref, [])):
        return None
    return _finish_norm(graph, chain, source, float(shift.args[1]))


def _finish_norm(
    graph: _Graph, chain: list[Operation], source: Ref, eps: float
) -> tuple[list[Operation], Operation] | None:
    """Follow what comes after the scaling: rounding, then the weight, or the other way round."""
    x = graph.tensor(source)
    if x.dtype not in VALUE_DTYPES or not x.is_contiguous():
        return None
    weight: Tensor | None = None
    rounds_first = False
    while True:
        last = chain[-1].outputs[0]
        users = graph.users.get(last, []) if last is not None else []
        step = users[0] if len(users) == 1 else None
        if step is None or last is None:
            break
        if step.name == "to" and step.outputs[0] and graph.tensor(step.outputs[0]).dtype == x.dtype:
            rounds_first = weight is None
        elif step.name == "mul" and weight is None and _is_weight(graph, _other(step, last), x):
            weight = graph.tensor(_other(step, last)).float().contiguous()
        else:
            break
        chain.append(step)
    result = chain[-1].outputs[0]
    if result is None or graph.tensor(result).dtype != x.dtype:
        return None
    function = _norm_call(x, weight, eps, rounds_first)
    return chain, Operation(function, (source,), {}, [result], "rms_norm", [source])


def _is_weight(graph: _Graph, ref: Any, x: Tensor) -> bool:
    return (
        isinstance(ref, Ref)
        and ref.number in graph.fixed
        and graph.tensor(ref).shape == x.shape[-1:]
    )


def _norm_call(
    like: Tensor, weight: Tensor | None, eps: float, rounds_first: bool
) -> Callable[[Tensor], Tensor]:
    shape, dtype, cols = tuple(like.shape), like.dtype, like.shape[-1]
    rows, is_bf16 = like.numel() // cols, like.dtype == torch.bfloat16
    address = 0 if weight is None else weight.data_ptr()
    native, empty = _native.rms_norm, torch.empty

    def norm(x: Tensor, keep: Tensor | None = weight) -> Tensor:  # `keep`: the address stays good
        out = empty(shape, dtype=dtype)
        native(rows, cols, eps, rounds_first, is_bf16, x.data_ptr(), cols, address, out.data_ptr())
        return out

    return norm


# ---- rotary embeddings ---------------------------------------------------------------------------


def _find_rotaries(graph: _Graph) -> Iterator[tuple[list[Operation], Operation]]:
    for turned in graph.operations:
        if turned.name == "cat":
            found = _match_rotary(graph, turned)
            if found is not None:
                yield found


def _match_rotary(graph: _Graph, turned: Operation) -> tuple[list[Operation], Operation] | None:
    parts = turned.args[0]
    if len(parts) != 2:
        return None
    negated = graph.made_by(parts[0], "neg")
    high = graph.made_by(negated.args[0], "slice") if negated else None
    low = graph.made_by(parts[1], "slice")
    by_sin = graph.only_user(turned.outputs[0], "mul")
    total = graph.only_user(by_sin.outputs[0], "add") if by_sin else None
    if not (negated and high and low and by_sin and total) or high.args[0] != low.args[0]:
        return None
    source = low.args[0]
    by_cos = graph.made_by(_other(total, by_sin.outputs[0]), "mul")  # type: ignore[arg-type]
    if by_cos is None or source not in by_cos.args or not _are_halves(graph, source, low, high):
        return None
    cos, sin = _other(by_cos, source), _other(by_sin, turned.outputs[0])  # type: ignore[arg-type]
    chain = [high, low, negated, turned, by_cos, by_sin]
    inner = {ref for op in chain for ref in op.outputs if ref is not None}
    if any(u not in (*chain, total) for ref in inner for u in graph.users.get(ref, [])):
        return None
    function = _rotary_call(graph, source, cos, sin)
    if function is None:
        return None
    args = (source, cos, sin)
    return [*chain, total], Operation(function, args, {}, total.outputs, "rotary", list(args))


def _are_halves(graph: _Graph, source: Ref, low: Operation, high: Operation) -> bool:
    x = graph.tensor(source)
    half = x.shape[-1] // 2
    is_last = all(op.args[1] in (-1, x.dim() - 1) for op in (low, high))
    return (
        is_last
        and x.shape[-1] == 2 * half
        and low.args[2:4] == (0, half)
        and high.args[2] == half
        and high.args[3] >= 2 * half
    )


def _rotary_call(
    graph: _Graph, source: Ref, cos_ref: Any, sin_ref: Any
) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Return the call for one token per row: (rows, heads, 1, dim) or (rows, 1, heads, dim)."""
    if not (isinstance(cos_ref, Ref) and isinstance(sin_ref, Ref)):
        return None
    x, cos, sin = graph.tensor(source), graph.tensor(cos_ref), graph.tensor(sin_ref)
    if x.dim() != 4 or x.dtype not in VALUE_DTYPES or x.stride(-1) != 1:
        return None
    if x.shape[2] == 1:
        heads = 1
    elif x.shape[1] == 1:
        heads = 2
    else:
        return None
    rows, dim = x.shape[0], x.shape[3]
    for table in (cos, sin):
        if table.dtype != x.dtype or table.numel() != rows * dim or not table.is_contiguous():
            return None
        if table.shape[0] != rows or table.shape[-1] != dim:
            return None
    shape, dtype, is_bf16 = tuple(x.shape), x.dtype, x.dtype == torch.bfloat16
    count, token_stride, head_stride = x.shape[heads], x.stride(0), x.stride(heads)
    native, empty = _native.rotate, torch.empty

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = empty(shape, dtype=dtype)
        native(
            rows, count, dim, dim, is_bf16, x.data_ptr(), token_stride, head_stride,
            cos.data_ptr(), sin.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    return rotate


# ---- small unpacked matrices: routers ------------------------------------------------------------


def _find_small_linears(
    graph: _Graph, threads: CpuThreads
) -> Iterator[tuple[list[Operation], Operation]]:
    """Take small bf16 matrices as they are: the same products, without torch's threads."""
    for operation in graph.operations:
        if operation.name != "linear" or operation.kwargs:
            continue
        source, *weights = operation.args
        tensors = [graph.tensor(ref) for ref in weights if isinstance(ref, Ref)]
        is_fixed = all(ref.number in graph.fixed for ref in weights if isinstance(ref, Ref))
        is_bf16 = all(x.dtype == torch.bfloat16 for x in [graph.tensor(source), *tensors])
        if is_fixed and is_bf16 and tensors and tensors[0].numel() <= _SMALL_WEIGHTS:
            bias = tensors[1] if len(tensors) > 1 else None
            packed = pack_dense(tensors[0], bias, find_format("bf16"))
            args = (threads, packed, source)
            outputs = operation.outputs
            yield [operation], Operation(operation.function, args, {}, outputs, DENSE, [source])


# ---- a router's choice ---------------------------------------------------------------------------


def _find_choices(graph: _Graph) -> Iterator[tuple[list[Operation], Operation]]:
    """Softmax, the largest, perhaps divided by their sum, perhaps rounded."""
    for softmax in graph.operations:
        best = graph.only_user(softmax.outputs[0], "topk") if softmax.name == "softmax" else None
        if best is None or best.kwargs or len(best.args) != 2:
            continue
        logits = graph.tensor(softmax.args[0])
        is_plain = (
            logits.dim() == 2
            and logits.is_contiguous()
            and logits.dtype in VALUE_DTYPES
            and softmax.args[1] in (-1, 1)
            and graph.tensor(best.args[0]).dtype == torch.float32
        )
        if is_plain:
            yield _fuse_choice(graph, softmax, best)


def _fuse_choice(
    graph: _Graph, softmax: Operation, best: Operation
) -> tuple[list[Operation], Operation]:
    chain, (values, index) = [softmax, best], best.outputs
    assert values is not None
    quotient = _division_by_sum(graph, values)
    if quotient is not None:
        chain += quotient
        values = quotient[-1].outputs[0] or values
    users = [user for user in graph.users.get(values, []) if user not in chain]
    if len(users) == 1 and users[0].name == "to":
        rounded = users[0].outputs[0]
        if rounded is not None and graph.tensor(rounded).dtype in VALUE_DTYPES:
            chain.append(users[0])
            values = rounded
    source = softmax.args[0]
    function = _choice_call(graph, source, values, best.args[1], quotient is not None)
    fused = Operation(
        function, (source,), {}, [values, index], "topk", [source], returns_sequence=True
    )
    return chain, fused


def _division_by_sum(graph: _Graph, values: Ref) -> list[Operation] | None:
    """Return the sum of the chosen weights and the division by it, if they come next."""
    users = graph.users.get(values, [])
    if len(users) < 2 or users[0].name != "sum" or users[1].name not in ("div", "div_"):
        return None
    total, quotient = users[:2]
    is_row = total.args[1:] in (([-1], True), ([1], True))
    is_it = graph.only_user(total.outputs[0], quotient.name) is quotient
    is_last = quotient.name == "div_" or len(users) == 2
    is_whole = quotient.args == (values, total.outputs[0])
    return [total, quotient] if is_row and is_it and is_last and is_whole else None


def _choice_call(
    graph: _Graph, logits: Ref, values: Ref, top_k: int, is_normalised: bool
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    like = graph.tensor(logits)
    tokens, num_experts = like.shape
    dtype, is_bf16 = graph.tensor(values).dtype, like.dtype == torch.bfloat16
    native, empty, int64 = _native.choose, torch.empty, torch.int64

    def choose(x: Tensor) -> tuple[Tensor, Tensor]:
        weights, index = empty((tokens, top_k), dtype=dtype), empty((tokens, top_k), dtype=int64)
        native(
            tokens, num_experts, top_k, is_normalised, is_bf16, x.data_ptr(),
            dtype == torch.bfloat16, weights.data_ptr(), index.data_ptr(),
        )  # fmt: skip
        return weights, index

    return choose


# ---- packed matrices that read the same input ----------------------------------------------------


def _find_dense_groups(graph: _Graph) -> Iterator[tuple[list[Operation], Operation]]:
    groups: dict[tuple[Any, ...], list[Operation]] = {}
    for operation in graph.operations:
        if operation.name == DENSE:
            threads, weight, x = operation.args
            key = (x, id(threads), weight.matrix.format, weight.in_features)
            groups.setdefault(key, []).append(operation)
    for group in groups.values():
        yield _dense_group(graph, group[:_MAX_MATRICES])


def _dense_group(graph: _Graph, group: list[Operation]) -> tuple[list[Operation], Operation]:
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
    return _first_last(group), fused


def _first_last(group: list[Operation]) -> list[Operation]:
    """Order a group so that the fused call stands where its first operation does."""
    return [*group[1:], group[0]]


# ---- attention of one token per row --------------------------------------------------------------


def _find_attentions(graph: _Graph) -> Iterator[tuple[list[Operation], Operation]]:
    for operation in graph.operations:
        if operation.name == ATTENTION:
            cache, attention, *refs = operation.args
            tensors = [graph.tensor(ref) for ref in refs]
            if len(cache.positions) == tensors[0].shape[1]:
                function = _attention_call(cache, attention, *tensors)
                outputs = operation.outputs
                yield (
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


# ---- a layer's experts ---------------------------------------------------------------------------


def _find_experts(
    graph: _Graph, threads: CpuThreads
) -> Iterator[tuple[list[Operation], Operation]]:
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
            yield [operation], fused

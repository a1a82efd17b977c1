"""Rotary embeddings whose halves are swapped: two slices, a negation, products and a sum."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tandem.hf.fusion.graph import Found, Graph, other
from tandem.hf.step_recorder import Operation, Ref
from tandem.kernels import _native
from tandem.kernels.dense import VALUE_DTYPES


def find_rotaries(graph: Graph) -> Iterator[Found]:
    """Find the embeddings around each swap of halves."""
    for turned in graph.operations:
        if turned.name == "cat":
            found = _match_rotary(graph, turned)
            if found is not None:
                yield found


def _match_rotary(graph: Graph, turned: Operation) -> Found | None:
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
    by_cos = graph.made_by(other(total, by_sin.outputs[0]), "mul")  # type: ignore[arg-type]
    if by_cos is None or source not in by_cos.args or not _are_halves(graph, source, low, high):
        return None
    cos, sin = other(by_cos, source), other(by_sin, turned.outputs[0])  # type: ignore[arg-type]
    chain = [high, low, negated, turned, by_cos, by_sin]
    inner = {ref for op in chain for ref in op.outputs if ref is not None}
    if any(u not in (*chain, total) for ref in inner for u in graph.users.get(ref, [])):
        return None
    function = _rotary_call(graph, source, cos, sin)
    if function is None:
        return None
    args = (source, cos, sin)
    fused = Operation(function, args, {}, total.outputs, "rotary", list(args))
    return Found([*chain, total], fused)


def _are_halves(graph: Graph, source: Ref, low: Operation, high: Operation) -> bool:
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
    graph: Graph, source: Ref, cos_ref: Any, sin_ref: Any
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

"""Finds rotary embeddings of halves and of pairs.

Models compute rotary embeddings of halves by swapping the halves: two slices, a negation, products
and a sum. In rotary embeddings of pairs, pairs are complex numbers, which are multiplied by complex
numbers of length 1.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads
from tandem.recording.fusion.graph import Found, Graph, other
from tandem.recording.program import NativeCall, require_contiguous
from tandem.recording.recorder import NotRecordableError, Operation, Ref

# Number of the heads' dimension -> the fused rotary embedding.
MakeRotary = Callable[[int], Callable[..., object]]
# Returns that dimension of an embedding's input with its cosines and sines; None: it is unknown.
HeadsOf = Callable[[Graph, Ref, object, object], int | None]


def find_rotaries(
    graph: Graph, make: MakeRotary, *, takes_prompts: bool = False
) -> Iterator[Found]:
    """Find rotary embeddings around each swap of halves.

    `make` returns the replacement, a function of x, cosines and sines. With `takes_prompts`, x may
    also be the tokens of one sequence: (1, heads, n_tokens, dim).
    """
    heads_of = _heads_of_any if takes_prompts else _heads_dimension
    return graph.found_around("cat", lambda turned: _match_rotary(graph, turned, make, heads_of))


def _match_rotary(
    graph: Graph, turned: Operation, make: MakeRotary, heads_of: HeadsOf
) -> Found | None:
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
    chain = [high, low, negated, turned, by_cos, by_sin, total]
    if graph.is_read_outside(chain, total.outputs):
        return None
    heads = heads_of(graph, source, cos, sin)
    if heads is None:
        return None
    args = (source, cos, sin)
    fused = Operation(make(heads), args, {}, total.outputs, "rotary", list(args))
    return Found(chain, fused)


def find_pair_rotaries(graph: Graph, threads: CpuThreads) -> Iterator[Found]:
    """Find rotary embeddings of pairs, around each conversion of complex numbers to real ones."""
    return graph.found_around("view_as_real", lambda real: _match_pairs(graph, real, threads))


def _match_pairs(graph: Graph, real: Operation, threads: CpuThreads) -> Found | None:
    turned = graph.made_by(real.args[0], "mul")
    if turned is None:
        return None
    numbers = [graph.made_by(ref, "view_as_complex") for ref in turned.args[:2]]
    as_complex = next((op for op in numbers if op is not None), None)
    pairs = graph.maker.get(as_complex.args[0]) if as_complex else None
    flat = graph.users.get(real.outputs[0], [])  # type: ignore[arg-type]
    if as_complex is None or pairs is None or len(flat) != 1:
        return None
    if not {pairs.name, flat[0].name} <= {"reshape", "view", "flatten"}:
        return None
    cast = graph.made_by(pairs.args[0], "to")
    source = cast.args[0] if cast else pairs.args[0]
    chain = [*([cast] if cast else []), pairs, as_complex, turned, real, flat[0]]
    back = graph.users.get(flat[0].outputs[0], [])  # type: ignore[arg-type]
    if len(back) == 1 and back[0].name in ("to", "type_as"):
        chain.append(back[0])
    turns, result = other(turned, as_complex.outputs[0]), chain[-1].outputs[0]  # type: ignore[arg-type]
    if graph.is_read_outside(chain, [result]):
        return None
    heads = _pairs_heads(graph, source, turns, result)
    if heads is None:
        return None
    args = (source, turns)
    call = _pairs_call(threads, heads)
    return Found(chain, Operation(call, args, {}, [result], "rotary", list(args)))


def _pairs_heads(graph: Graph, source: Ref, turns_ref: object, result: Ref | None) -> int | None:
    """Return the index of the heads' dimension; None if the embedding is not supported.

    The complex numbers must be (tokens, 1, 1, pairs).
    """
    if not isinstance(turns_ref, Ref) or result is None:
        return None
    x, turns, out = graph.tensor(source), graph.tensor(turns_ref), graph.tensor(result)
    if turns.dtype != torch.complex64 or not turns.is_contiguous():
        return None
    if (out.shape, out.dtype) != (x.shape, x.dtype):
        return None
    is_turn = 2 * turns.numel() == x.shape[0] * x.shape[-1] and 2 * turns.shape[-1] == x.shape[-1]
    return _heads_of(graph, x) if is_turn and turns.shape[0] == x.shape[0] else None


def _pairs_call(threads: CpuThreads, heads: int) -> NativeCall:
    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        (x, turns), (out,) = inputs, outputs
        require_contiguous(turns)
        if x.stride(-1) != 1:
            raise NotRecordableError("a head's values do not lie side by side")
        program.add_rotary_pairs(x.select(3 - heads, 0), torch.view_as_real(turns), out)

    return NativeCall(add, threads)


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


def _heads_dimension(graph: Graph, source: Ref, cos_ref: object, sin_ref: object) -> int | None:
    """Return the index of the heads' dimension; None if the embedding is not supported.

    The tensor `source` must be (tokens, heads, 1, dim) or (tokens, 1, heads, dim).
    """
    if not (isinstance(cos_ref, Ref) and isinstance(sin_ref, Ref)):
        return None
    x = graph.tensor(source)
    heads = _heads_of(graph, x)
    if heads is None:
        return None
    rows, dim = x.shape[0], x.shape[3]
    for table in (graph.tensor(cos_ref), graph.tensor(sin_ref)):
        if table.dtype != x.dtype or table.numel() != rows * dim or not table.is_contiguous():
            return None
        if table.shape[0] != rows or table.shape[-1] != dim:
            return None
    return heads


def _heads_of_any(graph: Graph, source: Ref, cos_ref: object, sin_ref: object) -> int | None:
    """Return the same as `_heads_dimension`; also 1 for a tensor (1, heads, n_tokens, dim)."""
    found = _heads_dimension(graph, source, cos_ref, sin_ref)
    if found is not None or not (isinstance(cos_ref, Ref) and isinstance(sin_ref, Ref)):
        return found
    x = graph.tensor(source)
    if x.dim() != 4 or len(x) != 1 or x.dtype not in graph.dtypes or x.stride(-1) != 1:
        return None
    shape = (1, *x.shape[2:])  # the heads' dimension is of size 1, or there is none
    for table in (graph.tensor(cos_ref), graph.tensor(sin_ref)):
        if table.dtype != x.dtype or not table.is_contiguous():
            return None
        if table.shape[-3:] != shape or table.numel() != shape[1] * shape[2]:
            return None
    return 1


def _heads_of(graph: Graph, x: Tensor) -> int | None:
    if x.dim() != 4 or x.dtype not in graph.dtypes or x.stride(-1) != 1:
        return None
    if 1 not in x.shape[1:3]:
        return None
    return 1 if x.shape[2] == 1 else 2


def rotary_call(threads: CpuThreads, heads: int) -> NativeCall:
    """Return the native call of a rotary embedding of halves; `heads` is the heads' dimension."""

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        (x, cos, sin), (out,) = inputs, outputs
        require_contiguous(cos, sin)
        if x.stride(-1) != 1:
            raise NotRecordableError("a head's values do not lie side by side")
        program.add_rotary(x.select(3 - heads, 0), cos, sin, out)

    return NativeCall(add, threads)

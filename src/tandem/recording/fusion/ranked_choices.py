"""Finds choices of experts by ranks, which are not the experts' weights: with biases, by groups.

In DeepSeek-V3, GLM-4 and MiniMax each expert has a score, and its rank is score + bias. Some
models first drop all groups of experts but those with the greatest sums of best ranks. The experts
with the greatest ranks are chosen; their scores are their weights.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads
from tandem.recording.fusion.graph import Found, Graph
from tandem.recording.fusion.routers import takes_largest
from tandem.recording.program import NativeCall, require_contiguous
from tandem.recording.recorder import Operation, Ref


class _Groups(NamedTuple):
    """How groups limit the choice: counts of all groups, of groups kept, of ranks in each sum."""

    groups: int = 1
    kept: int = 1
    best_of_group: int = 1


class _Weights(NamedTuple):
    """How scores become weights: if `is_normalised`, divided by their sum + `epsilon`; scaled."""

    is_normalised: bool = False
    epsilon: float = 0.0
    scale: float = 1.0


def find_ranked_choices(graph: Graph, threads: CpuThreads) -> Iterator[Found]:
    """Find routers' choices by ranks, each around its gather of scores."""
    return graph.found_around("gather", lambda gathered: _match(graph, gathered, threads))


def _match(graph: Graph, gathered: Operation, threads: CpuThreads) -> Found | None:
    scores, index = gathered.args[0], gathered.args[2]
    best = graph.made_by(index, "topk")
    if best is None or not takes_largest(best) or best.outputs[1] != index:
        return None
    if gathered.args[1] not in (-1, 1):
        return None
    masked = graph.made_by(best.args[0], "masked_fill")
    ranks, groups = best.args[0], _Groups()
    before: list[Operation] = []
    if masked is not None:
        found = _match_groups(graph, masked)
        if found is None:
            return None
        ranks = masked.args[0]
        before, groups = found
    after, weights = _follow(graph, gathered)
    result = after[-1].outputs[0]
    group = [*before, best, *after]
    if graph.is_read_outside(group, [index, result]):
        return None
    tensors = [graph.tensor(ref) for ref in (scores, ranks, result)]  # type: ignore[arg-type]
    if tensors[1].dtype != torch.float32 or any(x.dtype not in graph.dtypes for x in tensors):
        return None
    if not all(x.dim() == 2 and x.is_contiguous() for x in tensors):
        return None
    args = (scores, ranks)
    call = _ranked_call(threads, best.args[1], groups, weights)
    fused = Operation(call, args, {}, [result, index], "topk", list(args), returns_sequence=True)
    return Found(group, fused)


def _match_groups(graph: Graph, masked: Operation) -> tuple[list[Operation], _Groups] | None:
    """Return the operations that select groups of experts, and their `_Groups`; None if unknown.

    The operations compute sums of best ranks, a top-k of the sums, and a mask of the other groups.
    """
    if masked.args[2] != -math.inf:  # otherwise masked experts could still be chosen
        return None
    chain: list[Operation] = [masked]
    ref: Ref = masked.args[1]
    for name in ("bitwise_not", "to", "reshape", "expand", "unsqueeze"):
        made = graph.made_by(ref, name)
        if made is None:
            return None
        chain.append(made)
        ref = made.args[0]
    marked = next((op for op in graph.users.get(ref, []) if op.name == "scatter_"), None)
    if marked is None or marked.args[:2] != (ref, 1) or marked.args[3] != 1:
        return None
    chain.append(marked)
    kept = graph.made_by(marked.args[2], "topk")
    summed = graph.made_by(kept.args[0], "sum") if kept else None
    each = graph.made_by(summed.args[0], "topk") if summed else None
    grouped = graph.made_by(each.args[0], "view") if each else None
    if not (kept and summed and each and grouped) or grouped.args[0] != masked.args[0]:
        return None
    if summed.args[1:] != ([-1],) or kept.outputs[1] != marked.args[2]:
        return None
    if not takes_largest(kept) or not takes_largest(each, num_dimensions=3):
        return None
    blank = ref
    while (made := graph.maker.get(blank)) is not None and made.name in ("detach", "zeros_like"):
        chain.append(made)
        blank = made.args[0]
    if chain[-1].name != "zeros_like" or blank != kept.args[0]:
        return None
    chain += [kept, summed, each, grouped]
    groups = graph.tensor(each.args[0]).shape[1]
    return chain, _Groups(groups, kept.args[1], each.args[1])


def _follow(graph: Graph, gathered: Operation) -> tuple[list[Operation], _Weights]:
    """Return the operations on the chosen scores, from `gathered` on, and their `_Weights`.

    After `gathered` there may be a division by the sum and a multiplication by a factor.
    """
    chain, values = [gathered], gathered.outputs[0]
    weights = _Weights()
    users = graph.users.get(values, []) if values is not None else []
    if len(users) >= 2 and users[0].name == "sum" and users[0].args[1:] == ([-1], True):
        total, divided = users[0], users[1]
        shifted = graph.only_user(total.outputs[0], "add")
        divisor = (shifted or total).outputs[0]
        if divided.name in ("div", "div_") and divided.args == (values, divisor):
            chain += [total, *([shifted] if shifted else []), divided]
            epsilon = float(shifted.args[1]) if shifted else 0.0
            weights = _Weights(is_normalised=True, epsilon=epsilon)
            values = divided.outputs[0]
            users = [op for op in graph.users.get(values, []) if op not in chain]  # type: ignore[arg-type]
    if len(users) == 1 and users[0].name == "mul" and isinstance(users[0].args[1], float):
        chain.append(users[0])
        weights = weights._replace(scale=users[0].args[1])
    return chain, weights


def _ranked_call(threads: CpuThreads, top_k: int, groups: _Groups, weights: _Weights) -> NativeCall:
    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        (scores, ranks), (chosen, index) = inputs, outputs
        require_contiguous(scores, ranks)
        program.add_ranked_choice(top_k, *groups, *weights, scores, ranks, chosen, index)

    return NativeCall(add, threads)

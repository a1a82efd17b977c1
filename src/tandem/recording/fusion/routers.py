"""Finds routers: products with their small matrices, and the choice of experts by the scores."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads, DenseWeight, pack_dense
from tandem.kernels.formats.weight_format import find_format
from tandem.kernels.opaque_calls import DENSE
from tandem.recording.fusion.graph import Found, Graph
from tandem.recording.program import NativeCall, require_contiguous
from tandem.recording.recorder import Operation, Ref

# Routers up to this many weights are also packed; the copy takes little memory.
_SMALL_WEIGHTS = 1 << 21
_BF16 = find_format("bf16")


def find_small_linears(graph: Graph, threads: CpuThreads) -> Iterator[Found]:
    """Find linear layers of small bf16 matrices, to multiply without torch's threads."""
    for operation in graph.operations:
        if operation.name != "linear" or operation.kwargs:
            continue
        source, *rest = operation.args
        refs = [ref for ref in rest if isinstance(ref, Ref)]
        weights = [graph.tensor(ref) for ref in refs]
        if not weights or any(ref.number not in graph.fixed for ref in refs):
            continue
        if not graph.tensor(source).is_contiguous() or not _holds_bf16(graph, source):
            continue
        packed = pack_small(weights[0], weights[1] if len(weights) > 1 else None)
        if packed is not None:
            args = (threads, packed, source)
            outputs = operation.outputs
            fused = Operation(operation.function, args, {}, outputs, DENSE, [source])
            yield Found([operation], fused)


def pack_small(weight: Tensor, bias: Tensor | None) -> DenseWeight | None:
    """Return a weight (out, in) and bias packed as bf16; None if large, or not exact in bf16."""
    parameters = [weight] if bias is None else [weight, bias]
    if (
        weight.dim() != 2
        or weight.numel() > _SMALL_WEIGHTS
        or not all(map(_is_exact_in_bf16, parameters))
    ):
        return None
    return pack_dense(weight, bias, _BF16)


def _holds_bf16(graph: Graph, ref: Ref) -> bool:
    """Tell whether a tensor is bf16, or fp32 converted from bf16."""
    if graph.tensor(ref).dtype == torch.bfloat16:
        return True
    cast = graph.made_by(ref, "to")
    is_wider = graph.tensor(ref).dtype == torch.float32
    return is_wider and cast is not None and graph.tensor(cast.args[0]).dtype == torch.bfloat16


def _is_exact_in_bf16(x: Tensor) -> bool:
    if x.dtype == torch.bfloat16:
        return True
    return x.dtype == torch.float32 and torch.equal(x.bfloat16().float(), x)


# Returns a function of the logits that gives weights and index. Arguments: how many are chosen
# (`top_k`), how their weights are scaled (`scale`, `is_normalised`), and their `dtype`.
MakeChoice = Callable[..., Callable[..., object]]


def find_choices(graph: Graph, make: MakeChoice) -> Iterator[Found]:
    """Find choices of the form: softmax, top-k, then perhaps a norm, a scale or a rounding."""
    for softmax in graph.operations:
        best = graph.only_user(softmax.outputs[0], "topk") if softmax.name == "softmax" else None
        if best is None or best.kwargs or not takes_largest(best):
            continue
        logits = graph.tensor(softmax.args[0])
        is_plain = (
            logits.dim() == 2
            and logits.is_contiguous()
            and logits.dtype in graph.dtypes
            and softmax.args[1] in (-1, 1)
            and graph.tensor(best.args[0]).dtype == torch.float32
        )
        if is_plain:
            yield _fuse_choice(graph, softmax, best, make)


def find_choices_first(graph: Graph, make: MakeChoice) -> Iterator[Found]:
    """Find choices of the form: top-k, then softmax over the chosen scores.

    Their weights equal normalised weights of a softmax over all scores.
    """
    for best in graph.operations:
        if best.name != "topk" or best.kwargs or not takes_largest(best):
            continue
        values, index = best.outputs
        softmax = graph.only_user(values, "softmax")
        logits = graph.tensor(best.args[0])
        is_plain = logits.dim() == 2 and logits.is_contiguous() and logits.dtype in graph.dtypes
        if softmax is None or softmax.args[1] not in (-1, 1) or not is_plain:
            continue
        weights = softmax.outputs[0]
        if weights is None or graph.tensor(weights).dtype not in graph.dtypes:
            continue
        dtype = graph.tensor(weights).dtype
        call = make(top_k=best.args[1], scale=1.0, is_normalised=True, dtype=dtype)
        source, outputs = best.args[0], [weights, index]
        fused = Operation(call, (source,), {}, outputs, "topk", [source], returns_sequence=True)
        yield Found([best, softmax], fused)


def takes_largest(best: Operation, num_dimensions: int = 2) -> bool:
    """Tell whether a top-k selects the largest values along the last dimension."""
    dim = best.args[2] if len(best.args) > 2 else -1
    is_largest = best.args[3] if len(best.args) > 3 else True
    return dim in (-1, num_dimensions - 1) and bool(is_largest)


def _fuse_choice(graph: Graph, softmax: Operation, best: Operation, make: MakeChoice) -> Found:
    chain, (values, index) = [softmax, best], best.outputs
    assert values is not None
    quotient = _division_by_sum(graph, values)
    if quotient is not None:
        chain += quotient
        values = quotient[-1].outputs[0] or values
    scale = 1.0
    users = [user for user in graph.users.get(values, []) if user not in chain]
    if len(users) == 1 and users[0].name == "mul" and isinstance(users[0].args[1], float):
        scale = users[0].args[1]
        chain.append(users[0])
        values = users[0].outputs[0] or values
        users = graph.users.get(values, [])
    if len(users) == 1 and users[0].name == "to":
        rounded = users[0].outputs[0]
        if rounded is not None and graph.tensor(rounded).dtype in graph.dtypes:
            chain.append(users[0])
            values = rounded
    source = softmax.args[0]
    dtype = graph.tensor(values).dtype
    is_normalised = quotient is not None
    call = make(top_k=best.args[1], scale=scale, is_normalised=is_normalised, dtype=dtype)
    fused = Operation(call, (source,), {}, [values, index], "topk", [source], returns_sequence=True)
    return Found(chain, fused)


def _division_by_sum(graph: Graph, values: Ref) -> list[Operation] | None:
    """Return the operations that sum `values` and divide them by it; None if there are none."""
    users = graph.users.get(values, [])
    if len(users) < 2 or users[0].name != "sum" or users[1].name not in ("div", "div_"):
        return None
    total, quotient = users[:2]
    is_row = total.args[1:] in (([-1], True), ([1], True))
    is_it = graph.only_user(total.outputs[0], quotient.name) is quotient
    is_last = quotient.name == "div_" or len(users) == 2
    is_whole = quotient.args == (values, total.outputs[0])
    return [total, quotient] if is_row and is_it and is_last and is_whole else None


def choice_call(
    threads: CpuThreads, top_k: int, scale: float, *, is_normalised: bool, dtype: torch.dtype
) -> NativeCall:
    """Return the native call that selects each token's top-k experts from the router's logits."""

    def add(program: _native.Program, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        (logits,), (weights, index) = inputs, outputs
        require_contiguous(logits)
        program.add_choice(top_k, is_normalised, scale, logits, weights, index)

    return NativeCall(add, threads)

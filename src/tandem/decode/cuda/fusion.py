"""Groups of a recorded step that become one launch on a GPU: found as on the CPU, and more.

A sum that a norm reads is done with it; two rotary embeddings with the same angles are one launch,
and so is what else is computed value by value (`tandem.decode.cuda.chains`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.decode.cuda.chains import find_chains
from tandem.kernels.native import TOKEN_DTYPES
from tandem.kernels.rows import row_stride
from tandem.recording.fusion.graph import Found, Graph
from tandem.recording.fusion.norms import norms_as
from tandem.recording.fusion.rotary import rotaries_as
from tandem.recording.fusion.routers import choices_as, choices_first_as
from tandem.recording.recorder import Operation, Ref


@dataclass(frozen=True, slots=True, eq=False)
class _Norm:
    """A norm as one launch."""

    weight: Tensor | None
    eps: float
    rounds_first: bool

    def __call__(self, x: Tensor) -> Tensor:
        from tandem.triton_kernels import operations

        result: Tensor = operations.norm(x, self.weight, self.eps, self.rounds_first)
        return result


@dataclass(frozen=True, slots=True, eq=False)
class _SumAndNorm:
    norm: _Norm

    def __call__(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        from tandem.triton_kernels import operations

        norm = self.norm
        result: tuple[Tensor, Tensor] = operations.add_and_norm(
            x, other, norm.weight, norm.eps, norm.rounds_first
        )
        return result


@dataclass(frozen=True, slots=True, eq=False)
class _Rotary:
    heads: int

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        from tandem.triton_kernels import operations

        result: Tensor = operations.rotate(x, cos, sin, self.heads)
        return result


@dataclass(frozen=True, slots=True, eq=False)
class _TwoRotaries:
    heads: int

    def __call__(self, x: Tensor, other: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from tandem.triton_kernels import operations

        result: tuple[Tensor, Tensor] = operations.rotate_two(x, other, cos, sin, self.heads)
        return result


def _choice(
    top_k: int, scale: float, *, is_normalised: bool, dtype: torch.dtype
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    from tandem.triton_kernels import operations

    def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = operations.choose(logits, top_k, scale, is_normalised, dtype)
        return found

    return choose


def _sums_with_norms(graph: Graph) -> Iterator[Found]:
    """Find the norms whose input is a sum of two tensors of the same shape."""
    for norm in graph.operations:
        if not isinstance(norm.function, _Norm):
            continue
        total = graph.made_by(norm.args[0], "add")
        if total is None or total.kwargs or len(total.args) != 2:
            continue
        refs = total.inputs
        if len(refs) != 2 or not _are_alike(graph, *refs, norm.args[0]):
            continue
        outputs = [total.outputs[0], norm.outputs[0]]
        fused = Operation(
            _SumAndNorm(norm.function), tuple(refs), {}, outputs, "add_and_norm", list(refs),
            returns_sequence=True,
        )  # fmt: skip
        yield Found([total, norm], fused)


def _are_alike(graph: Graph, *refs: Ref) -> bool:
    first, *_ = tensors = [graph.tensor(ref) for ref in refs]
    return (
        all(
            x.shape == first.shape and x.dtype == first.dtype and row_stride(x) is not None
            for x in tensors
        )
        and first.dtype in graph.dtypes
    )


def _pairs_of_rotaries(graph: Graph) -> Iterator[Found]:
    """Find two embeddings by the same angles, as of queries and keys."""
    waiting: dict[tuple[Any, ...], Operation] = {}
    for rotary in graph.operations:
        if not isinstance(rotary.function, _Rotary):
            continue
        x, cos, sin = rotary.args
        key = (cos, sin, rotary.function.heads, graph.tensor(x).shape[-1])
        first = waiting.pop(key, None)
        if first is None:
            waiting[key] = rotary
            continue
        args = (first.args[0], x, cos, sin)
        fused = Operation(
            _TwoRotaries(rotary.function.heads), args, {},
            [first.outputs[0], rotary.outputs[0]], "rotary", list(args), returns_sequence=True,
        )  # fmt: skip
        yield Found([first, rotary], fused)


_FINDERS: tuple[Callable[[Graph], Iterator[Found]], ...] = (
    partial(norms_as, make=_Norm),
    partial(rotaries_as, make=_Rotary),
    partial(choices_as, make=_choice),
    partial(choices_first_as, make=_choice),
    _sums_with_norms,
    _pairs_of_rotaries,
    find_chains,
)


def fuse_for_gpu(
    operations: list[Operation], tensors: list[Tensor], fixed: set[int]
) -> list[Operation]:
    """Return the operations with groups replaced; `fixed` numbers the tensors that never change."""
    for finder in _FINDERS:
        graph = Graph(operations, tensors, fixed, TOKEN_DTYPES)
        for group, fused in finder(graph):
            graph.replace(group, fused)
        operations = graph.result()
    return operations

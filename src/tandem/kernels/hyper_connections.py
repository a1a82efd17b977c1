"""Hyper-connections: layers read a weighted sum of a token's residual streams and write to all.

Computed natively on the CPU; `csrc/hyper_connections.hpp` has the equations.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads

MOST_STREAMS = 16  # the same as in C++


class HyperConnection(NamedTuple):
    """The numbers that configure a hyper-connection; its tensors are passed separately."""

    norm_eps: float
    eps: float
    """Added to the weights of streams and mixture, and to sums that divide mixture weights."""
    output_factor: float = 0.0
    output_eps: float = 0.0
    num_rounds: int = 0
    """Rounds in which the mixture's rows and columns are divided by their sums; 0: no mixture."""


class StreamKernels(Protocol):
    """Mixes residual streams on one processor."""

    def mix_in(
        self,
        connection: HyperConnection,
        streams: Tensor,
        matrix: Tensor,
        base: Tensor,
        scales: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return a layer's input, and the weights for `mix_out`; see the function `mix_in`."""

    def mix_out(self, y: Tensor, weights: Tensor, streams: Tensor) -> Tensor:
        """Return the streams after a layer; see the function `mix_out`."""


def add_mix_in(
    program: _native.Program,
    connection: HyperConnection,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> None:
    """Add a call of `mix_in` to a program; its two results go to the memory of `outputs`."""
    program.add_mix_in(*connection, *inputs, *outputs)


def mix_in(
    threads: CpuThreads,
    connection: HyperConnection,
    streams: Tensor,
    matrix: Tensor,
    base: Tensor,
    scales: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return a layer's input (.., dim) from streams (.., streams, dim), and weights for `mix_out`.

    The weights are fp32 (.., rows - streams): first a weight of the output for each stream, if the
    matrix (rows, streams * dim) has rows for them; then the mixture's weight from each stream to
    each stream.
    """
    streams, matrix = streams.contiguous(), matrix.contiguous()
    *shape, num_streams, dim = streams.shape
    out = torch.empty((*shape, dim), dtype=streams.dtype, device="cpu")
    weights = torch.empty((*shape, len(base) - num_streams), device="cpu")
    program = threads.program()
    add_mix_in(program, connection, (streams, matrix, base, scales), (out, weights))
    program.run()
    return out, weights


def mix_out(threads: CpuThreads, y: Tensor, weights: Tensor, streams: Tensor) -> Tensor:
    """Return the streams after a layer with output y (.., dim); `weights` come from `mix_in`."""
    out = torch.empty(streams.shape, dtype=streams.dtype, device="cpu")
    program = threads.program()
    program.add_mix_out(y.contiguous(), weights, streams.contiguous(), out)
    program.run()
    return out

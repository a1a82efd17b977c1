"""Products of nn.Linear with packed matrices on the CPU, on the experts' kernels and threads.

A token's result does not depend on the other tokens of a call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from tandem.kernels import _native
from tandem.kernels.cpu import detect_cpu
from tandem.kernels.engine import choose_isa, start_engine
from tandem.kernels.formats.packed import PackedMatrix, pack, unpack
from tandem.kernels.formats.weight_format import ROWS_PER_BLOCK, WeightFormat

VALUE_DTYPES = (torch.float32, torch.bfloat16)


class CpuThreads:
    """The threads that a model's experts, dense layers and attention share.

    Only one call runs at a time; another waits for its end.
    """

    def __init__(self, *, num_threads: int | None = None, isa: str = "") -> None:
        """Choose the number of threads and the instruction set; threads start on first use.

        `num_threads` includes the calling thread; None means one for each fast core. `isa` names an
        instruction set; "" means the best one. Raises `ConfigError` if this CPU lacks the
        instruction set.
        """
        self.num_threads = num_threads or detect_cpu().num_threads
        self.isa = choose_isa(isa)

    @cached_property
    def engine(self) -> _native.ExpertEngine:
        """The native engine that owns the threads, which start on first access."""
        return start_engine(num_threads=self.num_threads, isa=self.isa)

    @cached_property
    def dense(self) -> _native.DenseEngine:
        """Multiplies dense matrices."""
        return _native.DenseEngine(self.engine)

    @cached_property
    def attention(self) -> _native.AttentionEngine:
        """Computes attention over cached keys and values."""
        return _native.AttentionEngine(self.engine)

    @cached_property
    def experts(self) -> _native.RoutedExperts:
        """Computes a layer's experts from the router's choice."""
        return _native.RoutedExperts(self.engine)

    @cached_property
    def recurrent(self) -> _native.RecurrentEngine:
        """Advances the states of convolutions and linear attention."""
        return _native.RecurrentEngine(self.engine)

    def program(self) -> _native.Program:
        """Return an empty program, which runs its operations as one call on these threads."""
        return _native.Program(
            self.engine, self.dense, self.attention, self.experts, self.recurrent
        )


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A packed (out_features, in_features) matrix and its bias, in the form that kernels read."""

    matrix: PackedMatrix
    bias: Tensor | None
    """fp32, padded to whole blocks."""
    native: _native.DenseMatrix = field(init=False)

    def __post_init__(self) -> None:
        fmt, matrix = self.matrix.format, self.matrix
        native = _native.make_dense_matrix(
            fmt.encoding.number,
            fmt.group_size or 0,
            matrix.rows,
            matrix.cols,
            fmt.padded_cols(matrix.cols),
            matrix.data,
            matrix.scales,
            self.bias,
        )
        object.__setattr__(self, "native", native)

    @property
    def out_features(self) -> int:
        """The number of outputs."""
        return self.matrix.rows

    @property
    def in_features(self) -> int:
        """The number of inputs."""
        return self.matrix.cols

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales, all of which a product reads."""
        scales = self.matrix.scales
        return self.matrix.data.nbytes + (0 if scales is None else scales.nbytes)

    def rows_at(self, first: int, count: int) -> "DenseWeight":
        """Return the `count` rows from `first` on as a weight in the same memory.

        `first` must be a multiple of 16.
        """
        matrix = self.matrix
        num_blocks = -(-matrix.rows // ROWS_PER_BLOCK)
        begin, end = first // ROWS_PER_BLOCK, -(-(first + count) // ROWS_PER_BLOCK)

        def part(of_all: Tensor | None) -> Tensor | None:
            if of_all is None:
                return None
            each = of_all.numel() // num_blocks
            return of_all[begin * each : end * each]

        data = part(matrix.data)
        assert data is not None
        rows = PackedMatrix(matrix.format, count, matrix.cols, data, part(matrix.scales))
        return DenseWeight(rows, part(self.bias))

    def values(self) -> Tensor:
        """Return the unpacked matrix in fp32, (out_features, in_features); this is slow."""
        return unpack(self.matrix)


def pack_dense(
    weight: Tensor,
    bias: Tensor | None,
    fmt: WeightFormat,
    *,
    importance: Tensor | None = None,
    name: str = "weight",
) -> DenseWeight:
    """Return the weight and bias of a linear layer, packed.

    `importance` (in_features,) weighs the rounding errors by input. Raises `ModelError` with `name`
    for weights that are NaN, infinite or too large for the format.
    """
    packed = pack(weight.detach(), fmt, importance=importance, name=name)
    return DenseWeight(packed, padded_bias(bias, weight.shape[0]))


def multiply(threads: CpuThreads, weights: Sequence[DenseWeight], x: Tensor) -> list[Tensor]:
    """Return x @ weight.T + bias for each weight: (..., in_features) -> (..., out_features).

    `x` must be fp32 or bf16; the results have its dtype. The weights, at most eight, must have the
    same format and number of input features, so that `x` is rounded only once.
    """
    x = x.contiguous()
    shape = x.shape[:-1]
    outputs = [
        torch.empty((*shape, weight.matrix.rows), dtype=x.dtype, device="cpu") for weight in weights
    ]
    threads.dense.run([weight.native for weight in weights], x, outputs)
    return outputs


def multiply_groups(threads: CpuThreads, weights: Sequence[DenseWeight], x: Tensor) -> Tensor:
    """Return each group's own product: (n_tokens, groups, in) -> (n_tokens, groups, out).

    `weights` has one (out, in) matrix per group, all of the same shape and format. `x` must be fp32
    or bf16, and is copied if its last dimension has gaps; the result has its dtype.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    shape = (len(x), len(weights), weights[0].matrix.rows)
    out = torch.empty(shape, dtype=x.dtype, device="cpu")
    threads.dense.run_groups([weight.native for weight in weights], x, out)
    return out


def padded_bias(bias: Tensor | None, rows: int) -> Tensor | None:
    """Return a bias of `rows` values as fp32, padded to whole blocks; None if there is no bias."""
    if bias is None:
        return None
    padded = torch.zeros(-(-rows // ROWS_PER_BLOCK) * ROWS_PER_BLOCK, device="cpu")
    padded[:rows] = bias.detach().float()
    return padded


def row_stride(x: Tensor) -> int | None:
    """Return the number of values from row to row; None if it varies or a row is not contiguous."""
    if x.stride(-1) != 1:
        return None
    try:
        return x.view(-1, x.shape[-1]).stride(0)
    except RuntimeError:  # such a view is impossible
        return None

"""All experts of a batch in two launches: up with its activation, then down. Launches, no waiting.

Checks nothing that costs time: addresses, rows and tokens are the executor's promise.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.core.errors import UnsupportedModelError
from tandem.kernels.formats.expert import ExpertLayout
from tandem.kernels.formats.weight_format import WeightFormat
from tandem.kernels.native import NativeActivation
from tandem.triton_kernels import combine, matrix, tiles, vector
from tandem.triton_kernels.rows import GroupedRows

_VECTOR_LANES = 32
# Chunks times tokens of a vector kernel: each takes two registers of fp32, and more spill.
_MOST_SUMS = 256
_PLAIN = -1  # of epilogue.py
_COMBINE_COLS = 1024


class Tiling(NamedTuple):
    """How large a program's tile is. Results do not depend on it, speed does."""

    block_lanes: int
    block_cols: int  # columns of weights in registers at once
    num_warps: int
    num_stages: int = 3


class Tilings(NamedTuple):
    """The tilings of both regimes; large ones are for tiles of 128 rows.

    `ordinary` are for products on ordinary cores, which hold a tile's columns in registers: 32
    columns of fp32 spill, and 64 take 120 KiB of shared memory, more than a consumer card has.
    """

    vector: Tiling = Tiling(_VECTOR_LANES, 512, 4)
    vector_many: Tiling = Tiling(_VECTOR_LANES, 256, 4)  # from 3 tokens an expert on
    matrix: Tiling = Tiling(64, 64, 4)
    matrix_large: Tiling = Tiling(128, 64, 8)
    ordinary: Tiling = Tiling(64, 16, 4)
    ordinary_large: Tiling = Tiling(64, 16, 8)

    def of_matrix(self, block_rows: int, *, on_matrix_units: bool) -> Tiling:
        """Return the tiling of the matrix kernels for tiles of so many rows."""
        if on_matrix_units:
            return self.matrix_large if block_rows == 128 else self.matrix
        return self.ordinary_large if block_rows == 128 else self.ordinary


DEFAULT_TILINGS = Tilings()


class Matrix(NamedTuple):
    """What a kernel must know of one packed matrix; see `matrix_of`."""

    num_rows: int
    constants: dict[str, Any]


class TritonExperts:
    """Computes batches of experts on the current CUDA stream."""

    name = "triton"

    def __init__(
        self, tilings: Tilings = DEFAULT_TILINGS, *, has_matrix_units: bool = True
    ) -> None:
        """Kernels are compiled when they are first launched, and kept on disk by Triton.

        `has_matrix_units` tells whether Triton can use the GPU's: from capability 8.0 on.
        """
        self._tilings = tilings
        self.has_matrix_units = has_matrix_units

    def compute(
        self,
        layout: ExpertLayout,
        activation: NativeActivation | None,
        hidden: Tensor,
        rows: GroupedRows,
        out: Tensor,
        activate: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Write one fp32 row per (token, expert) to `out` (n_rows, hidden_size).

        `hidden` is (n_tokens, hidden_size) bf16, fp16 or fp32 and contiguous. With `activation`
        None, `activate` maps [gate; up] rows in the dtype of `hidden` to the inner ones.
        """
        has_few_tokens = rows.block_rows == 0
        dtype = torch.float32 if has_few_tokens and activation is not None else hidden.dtype
        width = layout.intermediate_size * (layout.num_halves if activation is None else 1)
        inner = torch.empty((len(rows.row_token), width), dtype=dtype, device=hidden.device)
        launch = self._launch_vector if has_few_tokens else self._launch_matrix
        launch(_up(layout), rows, (rows.row_token, hidden, inner), _epilogue(layout, activation))
        if activation is None:
            assert activate is not None
            inner = activate(inner).contiguous()
        launch(_down(layout), rows, (inner, out), {})

    def add_rows(self, rows: Tensor, row_of: Tensor, weights: Tensor, out: Tensor) -> None:
        """Write sum over k of weight * row to `out` (n_tokens, hidden_size), first to last.

        `row_of` (n_tokens, top_k) int32; -1 adds nothing. All on one device, contiguous.
        """
        num_tokens, top_k = row_of.shape
        num_cols = rows.shape[1]
        grid = (-(-num_cols // _COMBINE_COLS), num_tokens)
        combine.add_rows[grid](
            rows, row_of, weights, out, num_cols=num_cols, top_k=top_k, block_cols=_COMBINE_COLS
        )

    def multiply(self, packed: Matrix, rows: GroupedRows, x: Tensor, out: Tensor) -> None:
        """Write x @ matrix.T to `out` (n_rows, matrix rows), in its dtype, by tiles of `rows`."""
        launch = self._launch_vector if rows.block_rows == 0 else self._launch_matrix
        launch(packed, rows, (x, out), {})

    def _launch_vector(
        self,
        packed: Matrix,
        rows: GroupedRows,
        tensors: tuple[Tensor, ...],
        more: dict[str, object],
    ) -> None:
        num_tokens = 1 << (rows.most_tokens - 1).bit_length()
        tiling = self._tilings.vector if num_tokens <= 2 else self._tilings.vector_many
        kernel = vector.vector_up if more else vector.vector_down
        num_lanes = 16 * packed.constants["num_blocks"]
        kernel[-(-num_lanes // _VECTOR_LANES), len(rows.addresses)](
            rows.addresses,
            rows.begin,
            *tensors,
            **packed.constants,
            **more,
            num_tokens=num_tokens,
            block_chunks=min(
                tiling.block_cols // packed.constants["per_dword"], _MOST_SUMS // num_tokens
            ),
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )

    def _launch_matrix(
        self,
        packed: Matrix,
        rows: GroupedRows,
        tensors: tuple[Tensor, ...],
        more: dict[str, object],
    ) -> None:
        kernel = matrix.matrix_up if more else matrix.matrix_down
        num_lanes = 16 * packed.constants["num_blocks"]
        is_fp32 = tensors[-2].dtype == torch.float32  # which the matrix units would round
        tiling = self._tilings.of_matrix(
            rows.block_rows, on_matrix_units=self.has_matrix_units and not is_fp32
        )
        kernel[-(-num_lanes // tiling.block_lanes), len(rows.tile_expert)](
            rows.addresses,
            rows.begin,
            rows.tile_expert,
            rows.tile_first,
            *tensors,
            **packed.constants,
            **more,
            block_rows=rows.block_rows,
            block_lanes=tiling.block_lanes,
            block_chunks=tiling.block_cols // packed.constants["per_dword"],
            precision="ieee" if is_fp32 else "tf32",
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )


@functools.lru_cache(maxsize=64)
def _up(layout: ExpertLayout) -> Matrix:
    sections = (layout.up.offset, layout.up_scales.offset, layout.up_bias.offset)
    cols, blocks = layout.hidden_size, layout.up_rows // 16
    rows = layout.intermediate_size
    return matrix_of(layout.format, sections, cols, rows, blocks, has_bias=layout.has_bias)


@functools.lru_cache(maxsize=64)
def _down(layout: ExpertLayout) -> Matrix:
    sections = (layout.down.offset, layout.down_scales.offset, layout.down_bias.offset)
    cols, blocks = layout.intermediate_size, layout.down_rows // 16
    rows = layout.hidden_size
    return matrix_of(layout.down_format, sections, cols, rows, blocks, has_bias=layout.has_bias)


def matrix_of(
    fmt: WeightFormat,
    sections: tuple[int, int, int],
    cols: int,
    rows: int,
    blocks: int,
    *,
    has_bias: bool,
) -> Matrix:
    """Return a packed matrix with its data, scales and bias at offsets from its address.

    `blocks` are those of 16 rows in memory; of a gated projection `rows` are the gate's alone.
    """
    if fmt.kind not in tiles.FACTOR_AND_OFFSET:
        raise UnsupportedModelError(
            f"experts in {fmt.name} have no kernels on a GPU; run them with device='cpu', or give "
            "an expert_dtype such as int8, to which they are rounded"
        )
    factor, offset = tiles.FACTOR_AND_OFFSET[fmt.kind]
    per_dword = fmt.weights_per_dword
    constants: dict[str, Any] = {
        "data_offset": sections[0],
        "scales_offset": sections[1],
        "bias_offset": sections[2] if has_bias else -1,
        "num_cols": cols,
        "num_rows": rows,
        "num_blocks": blocks,
        "num_chunks": fmt.padded_cols(cols) // per_dword,
        "kind": fmt.kind,
        "per_dword": per_dword,
        "chunks_per_group": (fmt.group_size or 0) // per_dword,
        "factor": factor,
        "value_offset": offset,
    }
    return Matrix(rows, constants)


@functools.lru_cache(maxsize=64)
def _epilogue(layout: ExpertLayout, activation: NativeActivation | None) -> dict[str, object]:
    numbers = {"alpha": 1.0, "limit": 0.0, "has_limit": False, "up_offset": 0.0}
    if activation is not None:
        numbers |= {"alpha": activation.alpha, "up_offset": activation.offset}
        if activation.limit != float("inf"):
            numbers |= {"limit": activation.limit, "has_limit": True}
    kind = _PLAIN if activation is None else int(activation.kind)
    return {"activation": kind, "is_gated": layout.is_gated, **numbers}

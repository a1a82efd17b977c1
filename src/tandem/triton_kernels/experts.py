"""All experts of a batch in two launches: up projection with activation, then down projection.

Launches never wait. There are no costly checks: the executor must pass valid addresses, rows and
tokens.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.kernels import _native
from tandem.kernels.formats.expert import ExpertLayout
from tandem.kernels.native import NativeActivation
from tandem.triton_kernels import combine, matrix, vector
from tandem.triton_kernels.epilogue import Epilogue
from tandem.triton_kernels.packed import Extent, Packed, extent_of, packed_as
from tandem.triton_kernels.rows import GroupedRows, vector_tokens

VECTOR_OUTPUTS = 32
# Largest number of chunks times tokens in a vector kernel. Each takes two fp32 registers; more
# would spill.
_MOST_SUMS = 256
_PLAIN = -1  # PLAIN of epilogue.py
_COMBINE_COLS = 1024


class Tiling(NamedTuple):
    """The size of a program's tile, which affects speed but not results."""

    block_outputs: int
    block_cols: int  # columns of weights in registers at a time
    num_warps: int
    num_stages: int = 3


class Tilings(NamedTuple):
    """The tilings of the vector and the matrix kernels; `..._large` are for tiles of 128 rows.

    `ordinary` and `ordinary_large` are for products on ordinary cores, which keep a tile's columns
    in registers: 32 columns of fp32 spill, and 64 columns take 120 KiB of shared memory, more than
    a consumer card has.
    """

    vector: Tiling = Tiling(VECTOR_OUTPUTS, 512, 4)
    vector_many: Tiling = Tiling(VECTOR_OUTPUTS, 256, 4)  # for 3 or more tokens per expert
    matrix: Tiling = Tiling(64, 64, 4)
    matrix_large: Tiling = Tiling(128, 64, 8)
    ordinary: Tiling = Tiling(64, 16, 4)
    ordinary_large: Tiling = Tiling(64, 16, 8)

    def vector_constants(self, packed: Packed, num_tokens: int) -> dict[str, Any]:
        """Return the vector kernels' compile-time constants, without those of the packed matrix."""
        tiling = self.vector if num_tokens <= 2 else self.vector_many
        return {
            "num_tokens": num_tokens,
            "block_chunks": min(tiling.block_cols // packed.per_chunk, _MOST_SUMS // num_tokens),
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
        }

    def matrix_constants(
        self, packed: Packed, block_rows: int, dtype: torch.dtype, *, has_matrix_units: bool
    ) -> dict[str, Any]:
        """Return the matrix kernels' compile-time constants, without those of the packed matrix."""
        is_fp32 = dtype == torch.float32  # the matrix units would round fp32
        on_matrix_units = has_matrix_units and not is_fp32
        tiling = self._of_matrix(block_rows, on_matrix_units=on_matrix_units)
        # The table's address takes registers, and none are left.
        if packed.table and not on_matrix_units:
            tiling = tiling._replace(num_stages=1)
        return {
            "block_rows": block_rows,
            "block_outputs": tiling.block_outputs,
            "block_chunks": tiling.block_cols // packed.per_chunk,
            "precision": "ieee" if is_fp32 else "tf32",
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
        }

    def _of_matrix(self, block_rows: int, *, on_matrix_units: bool) -> Tiling:
        if on_matrix_units:
            return self.matrix_large if block_rows == 128 else self.matrix
        return self.ordinary_large if block_rows == 128 else self.ordinary


DEFAULT_TILINGS = Tilings()
_MOST_VALUES = 16  # values of a table
_EIGHT_PLACES = (0, 8, 16, 24, 4, 12, 20, 28)  # bit positions of eight columns' codes in a dword


class TritonExperts:
    """Computes batches of experts on the current CUDA stream."""

    name = "triton"

    def __init__(
        self, tilings: Tilings = DEFAULT_TILINGS, *, has_matrix_units: bool = True
    ) -> None:
        """Use these tilings; kernels are compiled on first launch, and Triton caches them on disk.

        `has_matrix_units` tells whether Triton can use the GPU's matrix units, as it can from
        compute capability 8.0 on.
        """
        self.tilings = tilings
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

        `hidden` must be (n_tokens, hidden_size) bf16, fp16 or fp32 and contiguous. If `activation`
        is None, `activate` must map rows of [gate; up], in the dtype of `hidden`, to inner rows.
        """
        has_few_tokens = rows.block_rows == 0
        dtype = torch.float32 if has_few_tokens and activation is not None else hidden.dtype
        width = layout.intermediate_size * (layout.num_halves if activation is None else 1)
        inner = torch.empty((len(rows.row_token), width), dtype=dtype, device=hidden.device)
        launch = self._launch_vector if has_few_tokens else self._launch_matrix
        tensors = (rows.row_token, hidden, inner)
        launch(_up(layout), rows, tensors, _epilogue(layout, activation))
        if activation is None:
            assert activate is not None
            inner = activate(inner).contiguous()
        launch(_down(layout), rows, (inner, out))

    def add_rows(self, rows: Tensor, row_of: Tensor, weights: Tensor, out: Tensor) -> None:
        """Write each token's weighted sum of rows to `out` (n_tokens, hidden_size), in order of k.

        `row_of` is (n_tokens, top_k) int32: the row for each k; -1 adds nothing. All tensors must
        be contiguous and on one device.
        """
        num_tokens, top_k = row_of.shape
        num_cols = rows.shape[1]
        grid = (-(-num_cols // _COMBINE_COLS), num_tokens)
        combine.add_rows[grid](
            rows, row_of, weights, out, num_cols=num_cols, top_k=top_k, block_cols=_COMBINE_COLS
        )

    def _launch_vector(
        self,
        matrix_of: tuple[Packed, Extent],
        rows: GroupedRows,
        tensors: tuple[Tensor, ...],
        epilogue: Epilogue | None = None,
    ) -> None:
        (packed, extent), num_tokens = matrix_of, vector_tokens(rows.most_tokens)
        kernel = vector.vector_down if epilogue is None else vector.vector_up
        padded_outputs = 16 * extent.num_blocks
        kernel[-(-padded_outputs // VECTOR_OUTPUTS), len(rows.addresses)](
            rows.addresses,
            rows.begin,
            *tensors,
            table_on(packed.table, packed.lines_of, rows.addresses.device),
            packed=packed,
            extent=extent,
            **({} if epilogue is None else {"epilogue": epilogue}),
            **self.tilings.vector_constants(packed, num_tokens),
        )

    def _launch_matrix(
        self,
        matrix_of: tuple[Packed, Extent],
        rows: GroupedRows,
        tensors: tuple[Tensor, ...],
        epilogue: Epilogue | None = None,
    ) -> None:
        packed, extent = matrix_of
        kernel = matrix.matrix_down if epilogue is None else matrix.matrix_up
        constants = self.tilings.matrix_constants(
            packed, rows.block_rows, tensors[-2].dtype, has_matrix_units=self.has_matrix_units
        )
        kernel[-(-16 * extent.num_blocks // constants["block_outputs"]), len(rows.tile_expert)](
            rows.addresses,
            rows.begin,
            rows.tile_expert,
            rows.tile_first,
            *tensors,
            table_on(packed.table, packed.lines_of, rows.addresses.device),
            packed=packed,
            extent=extent,
            **({} if epilogue is None else {"epilogue": epilogue}),
            **constants,
        )


@functools.lru_cache(maxsize=64)
def _up(layout: ExpertLayout) -> tuple[Packed, Extent]:
    sections = (layout.up.offset, layout.up_scales.offset, layout.up_bias.offset)
    cols, blocks = layout.hidden_size, layout.up_rows // 16
    rows = layout.intermediate_size
    fmt, has_bias = layout.format, layout.has_bias
    return packed_as(fmt), extent_of(fmt, sections, cols, rows, blocks, has_bias=has_bias)


@functools.lru_cache(maxsize=64)
def _down(layout: ExpertLayout) -> tuple[Packed, Extent]:
    sections = (layout.down.offset, layout.down_scales.offset, layout.down_bias.offset)
    cols, blocks = layout.intermediate_size, layout.down_rows // 16
    rows = layout.hidden_size
    fmt, has_bias = layout.down_format, layout.has_bias
    return packed_as(fmt), extent_of(fmt, sections, cols, rows, blocks, has_bias=has_bias)


@functools.lru_cache(maxsize=64)
def table_on(values: tuple[float, ...], lines_of: int, device: torch.device) -> Tensor | None:
    """Return a format's table of codes on a device; None for a format without a table.

    The table begins with 16 numbers in fp16, which is exact for all of them and keeps reads from
    being staged in shared memory. Unless `lines_of` is -1, the grid lines of the format with this
    number follow as int32: four-bit codes in the dword order of `iq4_xs`, for eight columns or for
    the first four.
    """
    if not values:
        return None
    with torch.inference_mode(False):
        table = torch.zeros(_MOST_VALUES, dtype=torch.float16, device="cpu")
        table[: len(values)] = torch.tensor(values, device="cpu")
        if lines_of >= 0:
            lines = torch.tensor(_native.grid_lines(lines_of), device="cpu")
            is_of_eight = len(values) == 8  # each value takes two bits of a line
            bits, places = (2, _EIGHT_PLACES) if is_of_eight else (4, _EIGHT_PLACES[:4])
            words = torch.zeros_like(lines)
            for number, place in enumerate(places):
                words |= (lines >> bits * number & ((1 << bits) - 1)) << place
            table = torch.cat([table.view(torch.int32), words.to(torch.int32)]).view(torch.float16)
        return table.to(device)


@functools.lru_cache(maxsize=64)
def _epilogue(layout: ExpertLayout, activation: NativeActivation | None) -> Epilogue:
    if activation is None:
        return Epilogue(_PLAIN, layout.is_gated)
    has_limit = activation.limit != float("inf")
    return Epilogue(
        int(activation.kind),
        layout.is_gated,
        activation.alpha,
        activation.limit if has_limit else 0.0,
        has_limit,
        activation.offset,
    )

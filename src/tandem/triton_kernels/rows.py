"""Routed tokens grouped by expert, in one buffer, so that one copy moves them to the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Vector kernels serve up to this many tokens per expert; for more, matrix units are used.
MAX_VECTOR_TOKENS = 8
# Rows of a matrix kernel's tile, and the most tokens of a vector kernel. Each size is a kernel to
# compile. There is no size of 2 tokens, because the products of 4 are hidden behind reading the
# weights, too.
TILE_ROWS = (32, 64, 128)
VECTOR_TOKENS = (1, 4, MAX_VECTOR_TOKENS)
# Arguments of kernels that point into a table. Triton would compile a kernel for each alignment.
TABLES = ("addresses", "begin", "row_token", "tile_expert", "tile_first", "row_of", "weights")


class GroupedRows(NamedTuple):
    """Rows grouped by expert; tensors are on the device.

    Expert i, at address `addresses[i]`, has rows `begin[i]`..`begin[i + 1]` - 1, and row j belongs
    to token `row_token[j]`. Tiles are for the matrix kernels; with few tokens there are no tiles.
    """

    addresses: Tensor  # (n_experts,) int64
    begin: Tensor  # (n_experts + 1,) int32
    row_token: Tensor  # (n_rows,) int32
    tile_expert: Tensor  # (n_tiles,) int32
    tile_first: Tensor  # (n_tiles,) int32
    most_tokens: int
    """The largest number of rows that an expert has."""
    block_rows: int
    """Rows per tile; 0 for the vector kernels."""


@dataclass(frozen=True, slots=True)
class RowTable:
    """`GroupedRows` laid out in one int64 tensor on the host."""

    memory: Tensor  # (n,) int64
    num_experts: int
    num_rows: int
    num_tiles: int
    most_tokens: int
    block_rows: int

    def on(self, memory: Tensor) -> GroupedRows:
        """Return the rows as views of `memory`, a copy of the table's memory on any device."""
        addresses = memory[: self.num_experts]
        rest = memory[self.num_experts :].view(torch.int32)
        sizes = (self.num_experts + 1, self.num_rows, self.num_tiles, self.num_tiles)
        begin, row_token, tile_expert, tile_first = rest[: sum(sizes)].split(sizes)
        return GroupedRows(
            addresses, begin, row_token, tile_expert, tile_first, self.most_tokens, self.block_rows
        )


def row_table(addresses: Sequence[int], begin: Sequence[int], row_token: Tensor) -> RowTable:
    """Return a table of rows that are grouped by expert, as in `GroupedRows`.

    `begin` need not start at 0. `row_token` is (n_rows,) int32 on the host.
    """
    starts = np.asarray(begin, dtype=np.int32)
    starts = starts - starts[0]
    counts = np.diff(starts)
    most = int(counts.max())
    size = block_rows(most, float(counts.mean()))
    tile_expert, tile_first = _tiles(starts, counts, size)
    parts = [starts, row_token.numpy(), tile_expert, tile_first]
    num_ints = sum(len(part) for part in parts)
    memory = np.zeros(len(addresses) + (num_ints + 1) // 2, dtype=np.int64)
    memory[: len(addresses)] = addresses
    np.concatenate(parts, out=memory[len(addresses) :].view(np.int32)[:num_ints])
    return RowTable(
        torch.from_numpy(memory), len(addresses), len(row_token), len(tile_expert), most, size
    )


def vector_tokens(most: int) -> int:
    """Return the smallest of `VECTOR_TOKENS` that serves `most` tokens per expert."""
    return next(size for size in VECTOR_TOKENS if most <= size)


def block_rows(most: int, mean: float) -> int:
    """Return the rows of a tile, given the largest and the mean number of rows of an expert.

    0 means the vector kernels, which have no tiles.
    """
    if most <= MAX_VECTOR_TOKENS:
        return 0
    return next((size for size in TILE_ROWS if mean <= size), TILE_ROWS[-1])


def _tiles(
    starts: np.ndarray[tuple[int], np.dtype[np.int32]],
    counts: np.ndarray[tuple[int], np.dtype[np.int32]],
    block_rows: int,
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int32]], ...]:
    """Cut every expert's rows into tiles; return each tile's expert, and each tile's first row."""
    if block_rows == 0:
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    num_tiles = -(-counts // block_rows)
    expert = np.repeat(np.arange(len(counts), dtype=np.int32), num_tiles)
    before = np.cumsum(num_tiles) - num_tiles
    within = np.arange(len(expert), dtype=np.int32) - before[expert].astype(np.int32)
    return expert, (starts[expert] + within * block_rows).astype(np.int32)

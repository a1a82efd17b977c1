"""Finds a layer's experts and sorts its routed tokens by expert on a GPU, without the host.

    look_up      for few tokens: finds the address of each routed token's expert
    count_rows   for many tokens: each program counts the routed tokens of an expert
    sort_rows    each program places its expert's routed tokens after those of all experts with
                 lower numbers, and cuts tiles

Each program reads the whole choice, some kilobytes that are in the GPU's cache. That is faster than
a sort whose launches wait for each other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from tandem.triton_kernels.rows import GroupedRows, block_rows

_BLOCK = 1024  # routed tokens that a program looks at together
_FEW = 64  # in a step of few
_CHANGING = ("num_rows", "num_tiles")


@triton.jit(do_not_specialize=_CHANGING)
def look_up(
    index: tensor, table: tensor, addresses: tensor, row_of: tensor, num_rows: tensor,
    num_experts: constexpr, block: constexpr,
) -> None:  # fmt: skip
    """Write the address of each routed token's expert, and its row. There is one program.

    Padding gets the row -1 and the address of expert 0.
    """
    for start in range(0, num_rows, block):
        at = start + tl.arange(0, block)
        chosen = tl.load(index + at, mask=at < num_rows, other=0)
        is_expert = (chosen >= 0) & (chosen < num_experts)
        address = tl.load(table + tl.where(is_expert, chosen, 0))
        tl.store(addresses + at, address, mask=at < num_rows)
        tl.store(row_of + at, tl.where(is_expert, at, -1), mask=at < num_rows)


@triton.jit(do_not_specialize=_CHANGING)
def count_rows(index: tensor, counts: tensor, num_rows: tensor, block: constexpr) -> None:
    """Write the number of routed tokens of each expert. A program is an expert."""
    expert = tl.program_id(0)
    total = tl.full((block,), 0, dtype=tl.int32)
    for start in range(0, num_rows, block):
        at = start + tl.arange(0, block)
        chosen = tl.load(index + at, mask=at < num_rows, other=-1)
        total += (chosen == expert).to(tl.int32)
    tl.store(counts + expert, tl.reduce(total, 0, tl.standard._sum_combine))


@triton.jit(do_not_specialize=_CHANGING)
def sort_rows(
    index: tensor, counts: tensor, begin: tensor, row_token: tensor, row_of: tensor,
    tile_expert: tensor, tile_first: tensor, num_rows: tensor, num_tiles: tensor,
    num_experts: constexpr, width: constexpr, top_k: constexpr, tile_rows: constexpr,
    block: constexpr,
) -> None:  # fmt: skip
    """Write `GroupedRows`' tables and the row of each routed token. A program is an expert.

    One more program places padding after all rows, and surplus tiles, which have no rows, after all
    tiles. `width` must be a power of two and at least `num_experts`.
    """
    expert, other = tl.program_id(0), tl.arange(0, width)
    counted = tl.load(counts + other, mask=other < expert, other=0)
    first = tl.reduce(counted, 0, tl.standard._sum_combine)
    tiles = (counted + tile_rows - 1) // tile_rows
    first_tile = tl.reduce(tiles, 0, tl.standard._sum_combine)
    is_last, next_row = expert == num_experts, first
    for start in range(0, num_rows, block):
        at = start + tl.arange(0, block)
        chosen = tl.load(index + at, mask=at < num_rows, other=-1)
        is_none = (chosen < 0) | (chosen >= num_experts)
        is_mine = (at < num_rows) & tl.where(is_last, is_none, chosen == expert)
        rank = tl.associative_scan(is_mine.to(tl.int32), 0, tl.standard._sum_combine)
        row = next_row + rank - 1
        tl.store(row_of + at, tl.where(is_last, -1, row), mask=is_mine)
        tl.store(row_token + row, at // top_k, mask=is_mine)
        next_row += tl.reduce(is_mine.to(tl.int32), 0, tl.standard._sum_combine)
    tl.store(begin + expert, first)
    num_mine = (next_row - first + tile_rows - 1) // tile_rows
    num_mine = tl.where(is_last, num_tiles - first_tile, num_mine)
    for start in range(0, num_mine, block):
        tile = start + tl.arange(0, block)
        at, is_mine = first_tile + tile, tile < num_mine
        tl.store(tile_expert + at, tl.where(is_last, expert - 1, expert), mask=is_mine)
        tl.store(tile_first + at, tl.where(is_last, num_rows, first + tile * tile_rows), is_mine)


def each_alone(index: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the address of each routed token's expert, and the routed token's row.

    `index` (n_tokens, top_k) int64 and `table` (num_experts,), the experts' addresses, are on the
    device. Rows are in the routed tokens' order. Addresses are (n_tokens * top_k,), one per row;
    row numbers are (n_tokens, top_k), -1 for padding. Padding has an address, too, that of an
    arbitrary expert; results for it must be ignored.
    """
    num_rows, index = index.numel(), index.contiguous()
    addresses = torch.empty(num_rows, dtype=torch.int64, device=index.device)
    row_of = torch.empty(index.shape, dtype=torch.int32, device=index.device)
    look_up[1,](
        index, table, addresses, row_of, num_rows, num_experts=len(table), block=_FEW, num_warps=1
    )
    return addresses, row_of


def sorted_by_expert(index: Tensor, addresses: Tensor) -> tuple[GroupedRows, Tensor]:
    """Return a choice's routed tokens grouped by expert, and the row of each routed token.

    `index` (n_tokens, top_k) int64 and `addresses` (num_experts,) are on the device. Numbers in
    `index` that are not experts' are padding; the returned rows (n_tokens, top_k) are -1 there.
    The number of tiles suffices for any choice; surplus tiles have no rows.
    """
    num_rows, num_experts, index = index.numel(), len(addresses), index.contiguous()
    size = block_rows(num_rows, num_rows / num_experts)
    num_tiles = num_rows // size + min(num_experts, num_rows)
    counts, begin, row_token, row_of, tile_expert, tile_first = (
        torch.empty(count, dtype=torch.int32, device=index.device)
        for count in (num_experts, num_experts + 1, num_rows, num_rows, num_tiles, num_tiles)
    )
    count_rows[num_experts,](index, counts, num_rows, block=_BLOCK)
    sort_rows[num_experts + 1,](
        index, counts, begin, row_token, row_of, tile_expert, tile_first, num_rows, num_tiles,
        num_experts=num_experts, width=1 << max(0, num_experts - 1).bit_length(),
        top_k=index.shape[1], tile_rows=size, block=_BLOCK,
    )  # fmt: skip
    grouped = GroupedRows(
        addresses, begin, row_token, tile_expert, tile_first, len(index), block_rows=size
    )
    return grouped, row_of.view(index.shape)

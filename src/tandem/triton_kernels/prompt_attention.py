"""Attention of a prompt's tokens, which are of one slot: a program computes several tokens.

A program of `attention.attend_parts` reads keys for one token; a program of this module reads them
for `block_tokens` tokens. Results have the same form, and `join_parts` adds them up. Positions are
read on the device, so that a captured graph serves prompts that follow texts of any length.
"""

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from tandem.triton_kernels.attention import _line_scales, _pointer, _queries, _scores, _weights

_CHANGING = ("query_stride", "query_head_stride", "num_tokens")


@triton.jit
def _first_seen(position: tensor, window: constexpr, chunk: constexpr) -> tensor:
    """Return the first position that each token sees; `position` has the tokens' own positions."""
    first = tl.maximum(position + 1 - window, 0) if window > 0 else tl.minimum(position, 0)
    if chunk > 0:
        first = tl.maximum(first, position // chunk * chunk)
    return first


@triton.jit
def _is_seen(place: tensor, is_line: tensor, position: tensor, first: tensor) -> tensor:
    """Return whether each row's token sees each place, `first` to `position`: (rows, places)."""
    seen = (place[None, :] <= position[:, None]) & (place[None, :] >= first[:, None])
    return seen & is_line[None, :]


@triton.jit(do_not_specialize=_CHANGING)
def attend_tokens(
    where: tensor, slots: tensor, positions: tensor, query: tensor, parts: tensor, sums: tensor,
    query_stride: tensor, query_head_stride: tensor, num_tokens: tensor,
    num_heads: constexpr, num_kv_heads: constexpr, key_dim: constexpr, value_dim: constexpr,
    value_width: constexpr, line_dim: constexpr, kind: constexpr, scale: constexpr,
    softcap: constexpr, window: constexpr, chunk: constexpr, num_parts: constexpr,
    block_heads: constexpr, block_tokens: constexpr, block_keys: constexpr, block_dim: constexpr,
) -> None:  # fmt: skip
    """Attend to a part of the positions. A program is (some heads of a KV head, part, tokens).

    All tokens must be of the same slot, at any `positions`. Arguments and results are those of
    `attend_parts`; a row of a program's matrices is one head of one token.
    """
    group: constexpr = num_heads // num_kv_heads
    tiles: constexpr = (group + block_heads - 1) // block_heads
    blocks: constexpr = (value_dim + value_width - 1) // value_width
    rows: constexpr = block_heads * block_tokens
    tile = tl.program_id(0) // blocks
    kv_head, row = tile // tiles, tl.arange(0, rows)
    in_group = tile % tiles * block_heads + row % block_heads
    token = tl.program_id(2).to(tl.int64) * block_tokens + row // block_heads
    is_row = (in_group < group) & (token < num_tokens)
    head = kv_head * group + in_group
    position = tl.load(positions + token, mask=token < num_tokens, other=-1).to(tl.int32)
    first = _first_seen(position, window, chunk)
    end = tl.reduce(position, 0, tl.standard._elementwise_max) + 1
    lowest = tl.reduce(tl.where(is_row, first, end), 0, tl.standard._elementwise_min)
    num_blocks = (end - lowest + block_keys - 1) // block_keys
    each = (num_blocks + num_parts - 1) // num_parts * block_keys
    begin = lowest + tl.program_id(1) * each
    end = tl.minimum(begin + each, end)
    slot = tl.load(slots + tl.program_id(2) * block_tokens)
    base = (slot * num_kv_heads + kv_head) * tl.load(where + 4)
    keys, values = _pointer(tl.load(where), kind), _pointer(tl.load(where + 1), kind)
    lines = query + token * query_stride + head * query_head_stride
    queries = _queries(lines, is_row, key_dim, block_dim)
    largest = tl.full((rows,), float("-inf"), dtype=tl.float32)
    total = tl.full((rows,), 0.0, dtype=tl.float32)
    out = tl.full((rows, value_width), 0.0, dtype=tl.float32)
    dim = tl.program_id(0) % blocks * value_width + tl.arange(0, value_width)
    for start in range(begin, end, block_keys):
        place = start + tl.arange(0, block_keys)
        is_line, line = place < end, base + place
        scores = _scores(queries, keys, line, is_line, key_dim, block_dim, rows, block_keys)
        scores *= _line_scales(where + 2, line, is_line, scale, kind)[None, :]
        is_seen = _is_seen(place, is_line, position, first)
        weights, fade, largest = _weights(scores, is_seen, largest, softcap)
        total = total * fade + tl.reduce(weights, 1, tl.standard._sum_combine)
        weights *= _line_scales(where + 3, line, is_line, 1.0, kind)[None, :]
        mask = is_line[:, None] & (dim < value_dim)[None, :]
        some = tl.load(values + line[:, None] * line_dim + dim[None, :], mask=mask, other=0)
        some = some.to(query.dtype.element_ty)
        out = tl.dot(weights.to(some.dtype), some, out * fade[:, None], input_precision="ieee")
    at = (token * num_heads + head) * num_parts + tl.program_id(1)
    tl.store(sums + 2 * at, largest, mask=is_row)
    tl.store(sums + 2 * at + 1, total, mask=is_row)
    mask = is_row[:, None] & (dim < value_dim)[None, :]
    tl.store(parts + at[:, None] * value_dim + dim[None, :], out, mask=mask)

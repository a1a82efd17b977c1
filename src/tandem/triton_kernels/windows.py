"""Decode attention in windows beside compressed keys: tokens of any slots, one KV head.

    store_in_window       appends each token's key and compressed key
    attend_window_parts   each program: some heads of a token, a part of the keys that it sees

`where` is as in `attention`; `attention.join_parts` joins the parts. The first `ring` places of a
slot are a ring of its last positions; compressed keys follow. A key is also its value, and is read
once for both.
"""

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from tandem.triton_kernels.attention import _line_scales, _pointer, _store_line, _weights

_OF_TOKENS = ("key_stride", "compressed_stride")
_OF_QUERIES = ("query_stride", "query_head_stride", "num_chosen")
_LOWEST = constexpr(-1e30)  # the largest score of no keys; finite, because -inf minus -inf is NaN


@triton.jit(do_not_specialize=_OF_TOKENS)
def store_in_window(
    where: tensor,
    slots: tensor,
    positions: tensor,
    key: tensor,
    compressed: tensor,
    key_stride: tensor,
    compressed_stride: tensor,
    ring: constexpr,
    ratio: constexpr,
    dim: constexpr,
    width: constexpr,
    kind: constexpr,
) -> None:
    """Store each token's key in its slot's ring, and its compressed key. A program is a token.

    Compressed keys of tokens that end no window of `ratio` tokens go to the slot's last place.
    """
    token = tl.program_id(0).to(tl.int64)
    position, capacity = tl.load(positions + token), tl.load(where + 4)
    base = tl.load(slots + token) * capacity
    address, scales = tl.load(where), tl.load(where + 2)
    source = key + token * key_stride
    _store_line(source, address, scales, base + position % ring, dim, width, kind)
    if ratio > 0:
        is_last = (position + 1) % ratio == 0
        place = tl.where(is_last, ring + position // ratio, capacity - 1)
        source = compressed + token * compressed_stride
        _store_line(source, address, scales, base + place, dim, width, kind)


@triton.jit
def _part(
    position: tensor, num_chosen: tensor, window: constexpr, ratio: constexpr,
    has_chosen: constexpr, num_parts: constexpr, block_keys: constexpr,
) -> tensor:  # fmt: skip
    """Return (in_window, begin, end): a token sees `in_window` positions in its window.

    This program's part of the token's keys is the numbers from `begin` to before `end`; the
    window's keys are numbered first, then compressed keys.
    """
    in_window = tl.minimum(position + 1, window)
    length = in_window
    if has_chosen:
        length += num_chosen
    elif ratio > 0:
        length += (position + 1) // ratio
    blocks = (length + block_keys - 1) // block_keys
    each = (blocks + num_parts - 1) // num_parts * block_keys
    begin = tl.program_id(1) * each
    return in_window, begin, tl.minimum(begin + each, length)


@triton.jit
def _places(
    key: tensor, end: tensor, position: tensor, in_window: tensor, chosen: tensor, ring: constexpr,
    ratio: constexpr, has_chosen: constexpr,
) -> tensor:  # fmt: skip
    """Return the places in a slot of the keys numbered `key`; -1 where a number has no key."""
    place = (position + 1 - in_window + key) % ring
    if ratio > 0:
        number = key - in_window
        if has_chosen:
            is_compressed = (number >= 0) & (key < end)
            number = tl.load(chosen + number, mask=is_compressed, other=-1).to(tl.int32)
        compressed = tl.where(number >= 0, ring + number, -1)
        place = tl.where(key < in_window, place, compressed)
    return tl.where(key < end, place, -1)


@triton.jit(do_not_specialize=_OF_QUERIES)
def attend_window_parts(
    where: tensor, slots: tensor, positions: tensor, chosen: tensor, query: tensor, parts: tensor,
    sums: tensor, query_stride: tensor, query_head_stride: tensor, num_chosen: tensor,
    num_heads: constexpr, dim: constexpr, width: constexpr, kind: constexpr, scale: constexpr,
    window: constexpr, ring: constexpr, ratio: constexpr, has_chosen: constexpr,
    num_parts: constexpr, block_heads: constexpr, block_keys: constexpr,
) -> None:  # fmt: skip
    """Attend to a part of the keys. A program is (some heads, part, token).

    A token sees its window and all compressed keys before it; with `has_chosen`, of these only the
    keys in `chosen` (tokens, num_chosen), padded with -1. Writes `parts` and `sums` in the form of
    `attend_parts`.
    """
    token = tl.program_id(2).to(tl.int64)
    head = tl.program_id(0) * block_heads + tl.arange(0, block_heads)
    place_of_dim = tl.arange(0, width)
    is_head, is_dim = head < num_heads, place_of_dim < dim
    position = tl.load(positions + token).to(tl.int32)
    in_window, begin, end = _part(
        position, num_chosen, window, ratio, has_chosen, num_parts, block_keys
    )
    base = tl.load(slots + token) * tl.load(where + 4)
    keys = _pointer(tl.load(where), kind) + base * dim  # offsets within a slot fit 32 bits
    mask = is_head[:, None] & is_dim[None, :]
    at = query + token * query_stride + head[:, None] * query_head_stride + place_of_dim[None, :]
    queries = tl.load(at, mask=mask, other=0.0)
    largest = tl.full((block_heads,), _LOWEST, dtype=tl.float32)
    total = tl.full((block_heads,), 0.0, dtype=tl.float32)
    out = tl.full((block_heads, width), 0.0, dtype=tl.float32)
    chosen += token * num_chosen
    for start in range(begin, end, block_keys):
        key = start + tl.arange(0, block_keys)
        place = _places(key, end, position, in_window, chosen, ring, ratio, has_chosen)
        is_seen = place >= 0
        some = tl.load(
            keys + place[:, None] * dim + place_of_dim[None, :],
            mask=is_seen[:, None] & is_dim[None, :],
            other=0,
        ).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(some), input_precision="ieee")
        of_lines = _line_scales(where + 2, base + place, is_seen, 1.0, kind)[None, :]
        weights, fade, largest = _weights(scores * of_lines * scale, is_seen[None, :], largest, 0.0)
        total = total * fade + tl.reduce(weights, 1, tl.standard._sum_combine)
        weights = (weights * of_lines).to(some.dtype)
        out = tl.dot(weights, some, out * fade[:, None], input_precision="ieee")
    line = (token * num_heads + head) * num_parts + tl.program_id(1)
    tl.store(sums + 2 * line, largest, mask=is_head)
    tl.store(sums + 2 * line + 1, total, mask=is_head)
    at = parts + line[:, None] * dim + place_of_dim[None, :]
    tl.store(at, out, mask=mask & (begin < end))

"""An indexer's step: stores its keys, scores the keys of each token's slot, and selects the best.

    store_index_keys    appends each token's key
    score_index_keys    each program: some keys of a token's slot, by all heads
    score_prompt_keys   each program: some keys of a slot for some of its prompt's tokens
    select_index_keys   each program: the numbers of a token's best keys, ascending

The rules are those of `tandem.kv_cache.index_keys` for keys that stand for a block of tokens
(DeepSeek-V4). There are three launches, because all of a step's keys must be stored before they are
scored, and all keys of a slot must be scored before the best are selected.
"""

import triton
import triton.language as tl
from triton.language import constexpr, tensor

_OF_STORED = ("key_stride", "room")
_OF_SCORED = ("query_stride", "query_head_stride", "weight_stride", "room", "num_scores")
_OF_PROMPT = (
    "query_stride", "query_head_stride", "weight_stride", "first", "num_tokens", "num_scores",
)  # fmt: skip
_OF_SELECTED = ("num_scores", "most")
_DIGITS = constexpr(256)
_INFINITY = constexpr(float("inf"))


@triton.jit(do_not_specialize=_OF_STORED)
def store_index_keys(
    keys: tensor, slots: tensor, positions: tensor, new: tensor, key_stride: tensor,
    room: tensor, block: constexpr, dim: constexpr, width: constexpr,
) -> None:  # fmt: skip
    """Append each token's key to `keys` (slots, room, dim) fp32. A program is a token.

    Keys of tokens that end no block are written to the slot's last place.
    """
    token = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, width)
    position = tl.load(positions + token)
    place = tl.where((position + 1) % block == 0, position // block, room - 1)
    value = tl.load(new + token * key_stride + col, mask=col < dim, other=0.0)
    at = keys + (tl.load(slots + token) * room + place) * dim + col
    tl.store(at, value.to(tl.float32), mask=col < dim)


@triton.jit(do_not_specialize=_OF_SCORED)
def score_index_keys(
    keys: tensor, slots: tensor, positions: tensor, query: tensor, weights: tensor, scores: tensor,
    query_stride: tensor, query_head_stride: tensor, weight_stride: tensor, room: tensor,
    num_scores: tensor, scale: constexpr, block: constexpr, num_heads: constexpr, dim: constexpr,
    width: constexpr, block_keys: constexpr, block_heads: constexpr,
) -> None:  # fmt: skip
    """Write sum over heads of weight * relu(scale * query . key) to scores (tokens, num_scores).

    Only complete blocks up to a token are scored, including a block that the token ends; other
    entries of `scores` are unchanged. A program is (some keys, token).
    """
    token = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * block_keys + tl.arange(0, block_keys)
    num_whole = (tl.load(positions + token) + 1) // block
    is_key = number < num_whole
    if tl.program_id(0) * block_keys < num_whole:
        col = tl.arange(0, width)
        line = tl.load(slots + token) * room + number
        mask = is_key[:, None] & (col < dim)[None, :]
        some = tl.load(keys + line[:, None] * dim + col[None, :], mask=mask, other=0.0)
        total = tl.full((block_keys,), 0.0, dtype=tl.float32)
        for start in range(0, num_heads, block_heads):
            head = start + tl.arange(0, block_heads)
            is_head = head < num_heads
            at = query + token * query_stride + head[:, None] * query_head_stride + col[None, :]
            heads = tl.load(at, mask=is_head[:, None] & (col < dim)[None, :], other=0.0)
            dots = tl.dot(heads.to(tl.float32), tl.trans(some), input_precision="ieee") * scale
            # Keeps NaN of real heads. Missing heads may be NaN from infinite keys, so they are set
            # to 0.
            dots = tl.where((dots < 0.0) | ~is_head[:, None], 0.0, dots)
            weight = tl.load(weights + token * weight_stride + head, mask=is_head, other=0.0)
            total += tl.reduce(dots * weight.to(tl.float32)[:, None], 0, tl.standard._sum_combine)
        tl.store(scores + token * num_scores + number, total, mask=is_key)


@triton.jit(do_not_specialize=_OF_PROMPT)
def score_prompt_keys(
    keys: tensor, query: tensor, weights: tensor, scores: tensor, query_stride: tensor,
    query_head_stride: tensor, weight_stride: tensor, first: tensor, num_tokens: tensor,
    num_scores: tensor, scale: constexpr, block: constexpr, num_heads: constexpr, dim: constexpr,
    width: constexpr, block_keys: constexpr, block_tokens: constexpr,
) -> None:  # fmt: skip
    """Write the scores of `score_index_keys` for tokens of one slot, from position `first` on.

    The slot's `keys` are (room, dim). A program is (some keys, some tokens), so that these tokens
    share each read of a key.
    """
    token = tl.program_id(1) * block_tokens + tl.arange(0, block_tokens)
    number = tl.program_id(0) * block_keys + tl.arange(0, block_keys)
    is_token = token < num_tokens
    num_whole = (first + token + 1) // block
    end = (first + tl.minimum((tl.program_id(1) + 1) * block_tokens, num_tokens)) // block
    if tl.program_id(0) * block_keys < end:
        col = tl.arange(0, width)
        is_col = (col < dim)[None, :]
        place = keys + number.to(tl.int64)[:, None] * dim + col[None, :]
        some = tl.load(place, mask=(number < end)[:, None] & is_col, other=0.0)
        total = tl.full((block_tokens, block_keys), 0.0, dtype=tl.float32)
        line = token.to(tl.int64)
        for head in range(num_heads):
            at = query + line[:, None] * query_stride + head * query_head_stride + col[None, :]
            own = tl.load(at, mask=is_token[:, None] & is_col, other=0.0).to(tl.float32)
            dots = tl.dot(own, tl.trans(some), input_precision="ieee") * scale
            dots = tl.where(dots < 0.0, 0.0, dots)  # keeps NaN
            weight = tl.load(weights + line * weight_stride + head, mask=is_token, other=0.0)
            total += dots * weight.to(tl.float32)[:, None]
        is_seen = is_token[:, None] & (number[None, :] < num_whole[:, None])
        tl.store(scores + line[:, None] * num_scores + number[None, :], total, mask=is_seen)


@triton.jit
def _codes(scores: tensor, number: tensor, num_whole: tensor) -> tensor:
    """Return codes of the scores at `number`: 32-bit integers (in int64) that sort like the scores.

    NaN counts as infinite. The code is 0 for numbers from `num_whole` on.
    """
    score = tl.load(scores + number, mask=number < num_whole, other=0.0)
    score = tl.where(score != score, _INFINITY, score)
    score = tl.where(score == 0.0, 0.0, score)  # +0 and -0 must compare equal
    bits = score.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648
    return tl.where(number < num_whole, ordered, 0)


@triton.jit
def _threshold(scores: tensor, num_whole: tensor, most: tensor, block_scores: constexpr) -> tensor:
    """Return the code of the least selected score, and how many scores with this code are selected.

    The code is found eight bits at a time, from the highest, by counting each digit's scores.
    """
    digits = tl.arange(0, _DIGITS)
    code = (num_whole - num_whole).to(tl.int64)  # the bits found so far
    left = num_whole - num_whole + most
    for part in range(4):
        shift = 24 - 8 * part
        counts = tl.full((_DIGITS,), 0, dtype=tl.int32)
        for start in range(0, num_whole, block_scores):
            number = start + tl.arange(0, block_scores)
            found = _codes(scores, number, num_whole)
            is_in = (number < num_whole) & ((found >> (shift + 8)) == code)
            counts += tl.histogram(((found >> shift) & 255).to(tl.int32), _DIGITS, mask=is_in)
        at_least = tl.associative_scan(counts, 0, tl.standard._sum_combine, reverse=True)
        digit = tl.reduce(tl.where(at_least >= left, digits, 0), 0, tl.standard._elementwise_max)
        left -= tl.reduce(tl.where(digits > digit, counts, 0), 0, tl.standard._sum_combine)
        code = code * 256 + digit
    return code, left


@triton.jit(do_not_specialize=_OF_SELECTED)
def select_index_keys(
    scores: tensor, positions: tensor, chosen: tensor, num_scores: tensor, most: tensor,
    block: constexpr, block_scores: constexpr, marks: constexpr,
) -> None:  # fmt: skip
    """Write which keys are best for each token to `chosen`.

    Each program handles one token and reads `block_scores` scores at a time. Without `marks`,
    chosen is (tokens, most) and gets the best keys' indices, padded with -1; with `marks`, it is
    (tokens, num_scores), must contain zeros, and gets a 1 for each of the best keys.

    Each block of `block` positions has one key and one score, in scores (tokens, num_scores). Only
    blocks that are complete at the token's position count; of equal scores the first win. If there
    are at most `most` such blocks, scores are not read.
    """
    token = tl.program_id(0).to(tl.int64)
    num_whole = ((tl.load(positions + token) + 1) // block).to(tl.int32)
    chosen += token * (num_scores if marks else most)
    if num_whole <= most:
        for start in range(0, most, block_scores):
            number = start + tl.arange(0, block_scores)
            if marks:
                tl.store(chosen + number, number < num_whole, mask=number < num_whole)
            else:
                value = tl.where(number < num_whole, number, -1)
                tl.store(chosen + number, value, mask=number < most)
    else:
        scores += token * num_scores
        least, num_least = _threshold(scores, num_whole, most, block_scores)
        done = num_whole - num_whole
        seen = done  # number of keys so far that equal the least
        for start in range(0, num_whole, block_scores):
            number = start + tl.arange(0, block_scores)
            found = _codes(scores, number, num_whole)
            is_least = (found == least) & (number < num_whole)
            rank = seen + tl.associative_scan(is_least.to(tl.int32), 0, tl.standard._sum_combine)
            is_best = (found > least) | (is_least & (rank <= num_least))
            place = tl.associative_scan(is_best.to(tl.int32), 0, tl.standard._sum_combine) - 1
            if marks:
                tl.store(chosen + number, is_best, mask=is_best)
            else:
                tl.store(chosen + done + place, number, mask=is_best)
            done += tl.reduce(is_best.to(tl.int32), 0, tl.standard._sum_combine)
            seen += tl.reduce(is_least.to(tl.int32), 0, tl.standard._sum_combine)

"""Operations between a layer's matrices, for few rows: norms, rotary embeddings, routing.

Results are rounded at the same points as in the models' own code.
"""

import triton
import triton.language as tl
from triton.language import constexpr, tensor

_ROWS = ("row_stride", "other_stride")
_HEAD_STRIDES = ("stride", "head_stride", "token_stride", "out_head_stride", "out_token_stride")


@triton.jit
def _scaled(
    x: tensor,
    weight: tensor,
    col: tensor,
    num_cols: constexpr,
    eps: constexpr,
    has_weight: constexpr,
    rounds_first: constexpr,
    dtype: constexpr,
) -> tensor:
    """Return x over its root mean square, times the weight, fp32.

    With `rounds_first`, the quotient is rounded to `dtype` before the multiplication.
    """
    mean = tl.reduce(x * x, 0, tl.standard._sum_combine) / num_cols
    x = x / tl.sqrt(mean + eps)
    if rounds_first:
        x = x.to(dtype).to(tl.float32)
    if has_weight:
        x = x * tl.load(weight + col, mask=col < num_cols, other=0.0)
    return x


@triton.jit(do_not_specialize=_ROWS)
def norm_rows(
    x: tensor,
    weight: tensor,
    out: tensor,
    row_stride: tensor,
    num_cols: constexpr,
    width: constexpr,
    eps: constexpr,
    has_weight: constexpr,
    rounds_first: constexpr,
) -> None:
    """Write the RMS norm of each row: out (rows, num_cols). A program is a row."""
    row, col = tl.program_id(0).to(tl.int64), tl.arange(0, width)
    values = tl.load(x + row * row_stride + col, mask=col < num_cols, other=0.0).to(tl.float32)
    dtype: constexpr = out.dtype.element_ty
    done = _scaled(values, weight, col, num_cols, eps, has_weight, rounds_first, dtype)
    tl.store(out + row * num_cols + col, done.to(dtype), mask=col < num_cols)


@triton.jit(do_not_specialize=_ROWS)
def add_and_norm_rows(
    x: tensor,
    other: tensor,
    weight: tensor,
    total: tensor,
    out: tensor,
    row_stride: tensor,
    other_stride: tensor,
    num_cols: constexpr,
    width: constexpr,
    eps: constexpr,
    has_weight: constexpr,
    rounds_first: constexpr,
) -> None:
    """Write total = x + other and its RMS norm, both (rows, num_cols). A program is a row."""
    row, col = tl.program_id(0).to(tl.int64), tl.arange(0, width)
    mask = col < num_cols
    values = tl.load(x + row * row_stride + col, mask=mask, other=0.0).to(tl.float32)
    values += tl.load(other + row * other_stride + col, mask=mask, other=0.0).to(tl.float32)
    dtype: constexpr = out.dtype.element_ty
    rounded = values.to(dtype)
    tl.store(total + row * num_cols + col, rounded, mask=mask)
    done = _scaled(
        rounded.to(tl.float32), weight, col, num_cols, eps, has_weight, rounds_first, dtype
    )
    tl.store(out + row * num_cols + col, done.to(dtype), mask=mask)


@triton.jit
def _rotate(
    source: tensor,
    target: tensor,
    cos: tensor,
    sin: tensor,
    place: tensor,
    mask: tensor,
    half: constexpr,
) -> None:
    """Write a head's rotary embedding, x * cos + swapped x * sin, to `target`.

    Swapped x is x with its halves exchanged and the new first half negated. Each product and each
    sum is rounded to the dtype of `target`.
    """
    dtype: constexpr = target.dtype.element_ty
    low = tl.load(source + place, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + half + place, mask=mask, other=0.0).to(tl.float32)
    low_cos = tl.load(cos + place, mask=mask, other=0.0).to(tl.float32)
    low_sin = tl.load(sin + place, mask=mask, other=0.0).to(tl.float32)
    high_cos = tl.load(cos + half + place, mask=mask, other=0.0).to(tl.float32)
    high_sin = tl.load(sin + half + place, mask=mask, other=0.0).to(tl.float32)
    first = (low * low_cos).to(dtype).to(tl.float32) - (high * low_sin).to(dtype).to(tl.float32)
    second = (high * high_cos).to(dtype).to(tl.float32) + (low * high_sin).to(dtype).to(tl.float32)
    tl.store(target + place, first.to(dtype), mask=mask)
    tl.store(target + half + place, second.to(dtype), mask=mask)


@triton.jit(do_not_specialize=("stride", "head_stride", "other_stride", "other_head_stride"))
def rotate_heads(
    x: tensor,
    other: tensor,
    cos: tensor,
    sin: tensor,
    out: tensor,
    other_out: tensor,
    stride: tensor,
    head_stride: tensor,
    other_stride: tensor,
    other_head_stride: tensor,
    num_heads: constexpr,
    num_others: constexpr,
    dim: constexpr,
    width: constexpr,
) -> None:
    """Write the rotary embeddings of x and `other`: (rows, heads, dim) each.

    The tables `cos` and `sin` are (rows, dim). A program is (head of x or of `other`, row). See
    `_rotate`.
    """
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    half: constexpr = dim // 2
    place = tl.arange(0, width)
    mask = place < half
    cos += row * dim
    sin += row * dim
    if head < num_heads:
        source = x + row * stride + head * head_stride
        target = out + (row * num_heads + head) * dim
        _rotate(source, target, cos, sin, place, mask, half)
    else:
        head -= num_heads
        source = other + row * other_stride + head * other_head_stride
        target = other_out + (row * num_others + head) * dim
        _rotate(source, target, cos, sin, place, mask, half)


@triton.jit(do_not_specialize=_HEAD_STRIDES)
def rotate_pairs(
    x: tensor, cos: tensor, sin: tensor, out: tensor, stride: tensor, head_stride: tensor,
    token_stride: tensor, out_head_stride: tensor, out_token_stride: tensor, num_heads: constexpr,
    num_tokens: constexpr, num_pairs: constexpr, half: constexpr, width: constexpr,
) -> None:  # fmt: skip
    """Write each head with the last `num_pairs` of its `half` pairs of adjacent values rotated.

    The tables `cos` and `sin` are (rows, tokens, num_pairs). A program is (head, token, row).
    """
    head, token, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    place = tl.arange(0, width)
    mask = place < half
    source = x + row * stride + head * head_stride + token * token_stride + 2 * place
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + 1, mask=mask, other=0.0).to(tl.float32)
    at = (row * num_tokens + token) * num_pairs + place - (half - num_pairs)
    turns = mask & (place >= half - num_pairs)
    by_cos = tl.load(cos + at, mask=turns, other=0.0).to(tl.float32)
    by_sin = tl.load(sin + at, mask=turns, other=0.0).to(tl.float32)
    target = out + row * num_heads * num_tokens * 2 * half + head * out_head_stride
    target += token * out_token_stride + 2 * place
    dtype: constexpr = out.dtype.element_ty
    turned = first * by_cos - second * by_sin
    tl.store(target, tl.where(turns, turned, first).to(dtype), mask=mask)
    turned = second * by_cos + first * by_sin
    tl.store(target + 1, tl.where(turns, turned, second).to(dtype), mask=mask)


@triton.jit
def choose_experts(
    logits: tensor,
    weights: tensor,
    index: tensor,
    num_experts: constexpr,
    width: constexpr,
    top_k: constexpr,
    is_normalised: constexpr,
    scale: constexpr,
) -> None:
    """Write the largest values of each row's softmax, best first: weights and index (rows, top_k).

    Of equal values the first is chosen. With `is_normalised`, weights are divided by their sum.
    Then they are multiplied by `scale`. A program is a row of logits (rows, num_experts).
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, width)
    is_expert = place < num_experts
    found = tl.load(logits + row * num_experts + place, mask=is_expert, other=float("-inf"))
    found = found.to(tl.float32)
    top = tl.reduce(found, 0, tl.standard._elementwise_max)
    scores = tl.exp(found - top)
    whole = tl.reduce(scores, 0, tl.standard._sum_combine)
    total = whole * 0.0
    left = tl.where(is_expert, scores, -1.0)
    kept = tl.full((width,), 0.0, dtype=tl.float32)
    experts = tl.full((width,), 0, dtype=tl.int32)
    for k in range(top_k):
        best = tl.reduce(left, 0, tl.standard._elementwise_max)
        expert = tl.reduce(tl.where(left == best, place, width), 0, tl.standard._elementwise_min)
        kept, experts = tl.where(place == k, best, kept), tl.where(place == k, expert, experts)
        left = tl.where(place == expert, -1.0, left)
        total += best
    divisor = total if is_normalised else whole
    at, mask = row * top_k + place, place < top_k
    tl.store(weights + at, (kept / divisor * scale).to(weights.dtype.element_ty), mask=mask)
    tl.store(index + at, experts.to(tl.int64), mask=mask)

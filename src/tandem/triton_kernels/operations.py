"""The kernels of `small` as torch operations, so that recordings and captures see them.

Each is one launch, does no costly checks, and returns new tensors.
"""

import torch
from torch import Tensor

from tandem.kernels.dense import row_stride
from tandem.triton_kernels import small

_FEW_WARPS_WIDTH = 1024


@torch.library.custom_op("tandem::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor | None, eps: float, rounds_first: bool) -> Tensor:
    """Return the RMS norm of x (..., n), whose rows must be evenly spaced.

    `weight` is (n,) fp32. With `rounds_first`, values are rounded before they are multiplied by the
    weight.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_cols = x.shape[-1]
    small.norm_rows[(x.numel() // num_cols,)](
        x, x if weight is None else weight, out, row_stride(x), num_cols=num_cols,
        width=_width(num_cols), eps=eps, has_weight=weight is not None, rounds_first=rounds_first,
        num_warps=_warps(num_cols),
    )  # fmt: skip
    return out


@torch.library.custom_op("tandem::add_and_norm", mutates_args=())
def add_and_norm(
    x: Tensor, other: Tensor, weight: Tensor | None, eps: float, rounds_first: bool
) -> tuple[Tensor, Tensor]:
    """Return x + other and its RMS norm, both (..., n); see `norm`."""
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    num_cols = x.shape[-1]
    small.add_and_norm_rows[(x.numel() // num_cols,)](
        x, other, x if weight is None else weight, total, out, row_stride(x), row_stride(other),
        num_cols=num_cols, width=_width(num_cols), eps=eps, has_weight=weight is not None,
        rounds_first=rounds_first, num_warps=_warps(num_cols),
    )  # fmt: skip
    return total, out


@torch.library.custom_op("tandem::rotate", mutates_args=())
def rotate(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Return the rotary embedding of x (rows, ., ., dim), whose heads are in dimension `heads`.

    `heads` is 1 or 2. The other middle dimension must have size 1, unless it has the rows, as in a
    prompt's (1, heads, n_tokens, dim). cos and sin have rows * dim elements.
    """
    out = _room_for_rotated(x, heads)
    _rotate((x, x), cos, sin, (out, out), heads, num_others=0)
    return out


@torch.library.custom_op("tandem::rotate_two", mutates_args=())
def rotate_two(
    x: Tensor, other: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """Return the rotary embeddings of two tensors that differ only in their number of heads."""
    out, other_out = (_room_for_rotated(y, heads) for y in (x, other))
    _rotate((x, other), cos, sin, (out, other_out), heads, num_others=other.shape[heads])
    return out, other_out


def _room_for_rotated(x: Tensor, heads: int) -> Tensor:
    """Return an empty tensor in the shape of x, whose memory has the heads of each row together."""
    if heads == 1 and x.shape[2] > 1:
        return x.new_empty((1, x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _rotate(
    sources: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    targets: tuple[Tensor, Tensor],
    heads: int,
    *,
    num_others: int,
) -> None:
    x, other = sources
    rows = 0 if x.shape[3 - heads] == 1 else 3 - heads
    num_rows, num_heads, dim = x.shape[rows], x.shape[heads], x.shape[3]
    small.rotate_heads[num_heads + num_others, num_rows](
        x, other, cos, sin, *targets, x.stride(rows), x.stride(heads), other.stride(rows),
        other.stride(heads), num_heads=num_heads, num_others=num_others, dim=dim,
        width=_width(dim // 2), num_warps=1,
    )  # fmt: skip


@torch.library.custom_op("tandem::rotate_pairs", mutates_args=())
def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Return x (rows, ., ., dim) with the last `pairs` pairs of adjacent values per head rotated.

    The heads are in dimension `heads` of x, 1 or 2. cos and sin are (rows, tokens, pairs).
    """
    x, cos, sin = x if x.stride(3) == 1 else x.contiguous(), cos.contiguous(), sin.contiguous()
    out, tokens = torch.empty(x.shape, dtype=x.dtype, device=x.device), 3 - heads
    num_rows, num_heads, num_tokens, half = len(x), x.shape[heads], x.shape[tokens], x.shape[3] // 2
    small.rotate_pairs[num_heads, num_tokens, num_rows](
        x, cos, sin, out, x.stride(0), x.stride(heads), x.stride(tokens), out.stride(heads),
        out.stride(tokens), num_heads=num_heads, num_tokens=num_tokens, num_pairs=cos.shape[2],
        half=half, width=_width(half), num_warps=1,
    )  # fmt: skip
    return out


@torch.library.custom_op("tandem::choose", mutates_args=())
def choose(
    logits: Tensor, top_k: int, scale: float, is_normalised: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the weights in `dtype` and the numbers (int64) of the best experts, (rows, top_k).

    The best experts are those with the largest `logits` (rows, experts); see
    `small.choose_experts`.
    """
    num_tokens, num_experts = logits.shape
    weights = torch.empty((num_tokens, top_k), dtype=dtype, device=logits.device)
    index = torch.empty((num_tokens, top_k), dtype=torch.int64, device=logits.device)
    small.choose_experts[(num_tokens,)](
        logits, weights, index, num_experts=num_experts, width=_width(num_experts), top_k=top_k,
        is_normalised=is_normalised, scale=scale, num_warps=1 if num_experts <= 256 else 4,
    )  # fmt: skip
    return weights, index


def _width(num_cols: int) -> int:
    return max(16, 1 << (num_cols - 1).bit_length())


def _warps(num_cols: int) -> int:
    return 1 if num_cols <= _FEW_WARPS_WIDTH // 4 else 4 if num_cols <= 4096 else 8

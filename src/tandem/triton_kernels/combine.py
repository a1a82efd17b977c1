"""Adds up the computed rows of each token in the router's order, which is also the CPU's order."""

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from tandem.triton_kernels.rows import TABLES


@triton.jit(do_not_specialize_on_alignment=TABLES)
def add_rows(
    rows: tensor,
    row_of: tensor,
    weights: tensor,
    out: tensor,
    num_cols: constexpr,
    top_k: constexpr,
    block_cols: constexpr,
) -> None:
    """Write sum over k of weights[t, k] * rows[row_of[t, k]] to out (n_tokens, num_cols).

    `rows` is fp32; -1 in `row_of` adds nothing. A program is (block of columns, token).
    """
    token = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * block_cols + tl.arange(0, block_cols)
    total = tl.full((block_cols,), 0.0, dtype=tl.float32)
    for k in range(top_k):
        row = tl.load(row_of + token * top_k + k).to(tl.int64)
        weight = tl.load(weights + token * top_k + k).to(tl.float32)
        mask = (col < num_cols) & (row >= 0)
        total += weight * tl.load(rows + row * num_cols + col, mask=mask, other=0.0)
    tl.store(out + token * num_cols + col, total.to(out.dtype.element_ty), mask=col < num_cols)

"""Launches once each kernel that a model's batches can need, so that it is compiled and loaded.

Triton compiles a kernel for each tile size and caches it on disk. A model with one layout needs
more than ten kernels, which take seconds each to compile; compiled on demand, they would make the
first requests slow.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tandem.kernels.formats.expert import ExpertLayout
from tandem.kernels.native import NativeActivation
from tandem.triton_kernels.experts import TritonExperts
from tandem.triton_kernels.rows import TILE_ROWS, VECTOR_TOKENS, row_table


def variants(
    experts: TritonExperts,
    layout: ExpertLayout,
    activation: NativeActivation | None,
    activate: Callable[[Tensor], Tensor],
    *,
    dtype: torch.dtype,
    top_k: int,
    device: torch.device,
) -> list[Callable[[], None]]:
    """Return functions that together launch every kernel of a layout on the current stream."""

    def compute(num_tokens: int) -> None:
        """Compute `num_tokens` tokens with one expert whose weights are zeros."""
        image = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        table = row_table(
            [image.data_ptr()],
            [0, num_tokens],
            torch.zeros(num_tokens, dtype=torch.int32, device="cpu"),
        )
        hidden = torch.zeros(1, layout.hidden_size, dtype=dtype, device=device)
        out = torch.empty(num_tokens, layout.hidden_size, device=device)
        rows = table.on(table.memory.to(device))
        experts.compute(layout, activation, hidden, rows, out, activate)

    def add_rows(out_dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        """Add up the rows of one token."""
        rows = torch.zeros(1, layout.hidden_size, device=device)
        row_of = torch.zeros(1, top_k, dtype=torch.int32, device=device)
        weights = torch.zeros(1, top_k, dtype=weights_dtype, device=device)
        experts.add_rows(rows, row_of, weights, torch.empty_like(rows, dtype=out_dtype))

    # Of planned layers sums and weights are fp32, of resident ones in the model's dtype; some
    # models' weights are fp32 there too.
    dtypes = dict.fromkeys(((torch.float32, torch.float32), (dtype, torch.float32), (dtype, dtype)))
    return [
        *(partial(compute, num_tokens) for num_tokens in (*VECTOR_TOKENS, *TILE_ROWS)),
        *(partial(add_rows, *pair) for pair in dtypes),
    ]

"""Inputs in the order that an expert's codes have: GPTQ's activation order, kept exactly.

A layer whose experts order their inputs has a row of inputs for each (token, expert) instead of one
for each token. That costs a copy of these rows, and the weights stay as they are in the checkpoint.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def ordered_inputs(
    hidden: Tensor,
    input_order: Tensor,
    experts: Sequence[int],
    begin: Sequence[int],
    token: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return a batch's inputs (n_rows, hidden_size) and their numbers (n_rows,) int32.

    `experts`, `begin` and `token` are those of an `ExpertBatch`; `input_order` is the layer's
    (num_experts, hidden_size).
    """
    counts = torch.tensor([begin[i + 1] - begin[i] for i in range(len(experts))], device="cpu")
    expert_of_row = torch.tensor(experts, device="cpu").repeat_interleave(counts)
    inputs = input_order[expert_of_row].long().to(hidden.device)  # (n_rows, hidden_size)
    rows = hidden[token.long().to(hidden.device)].gather(1, inputs)
    return rows, torch.arange(len(rows), dtype=torch.int32, device="cpu")

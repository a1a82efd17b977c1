"""Launches the kernels by which a captured step hands a layer over to the host; never waits.

Tensors of the mailbox lie in mapped host memory, all others on the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.triton_kernels import hand_over

_COMBINE_COLS = 1024
_PUBLISHED_AT_ONCE = 1024
_MOST_POLLS = 1 << 30  # the host's watchdog ends a wait much earlier


class MailboxTensors(NamedTuple):
    """One layer's mailbox, and what all layers share."""

    doorbell: Tensor  # (1,) int32
    done: Tensor  # (1,) int32
    choice: Tensor  # (rows, top_k) int32
    is_hit: Tensor  # (rows, top_k) int32
    weights: Tensor  # (rows, top_k) fp32
    hidden: Tensor  # (rows, hidden_size) in the model's dtype
    results: Tensor  # (rows * top_k, hidden_size) fp32


def publish(
    box: MailboxTensors,
    address_of: Tensor,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    *,
    rings: bool,
) -> Tensor:
    """Publish a layer; return the addresses of its hits, (rows * top_k,) int64, 0 for no hit.

    `address_of` is (num_experts,) int64. With `rings` the kernel itself sets the doorbell.
    """
    num_choices, num_values = index.numel(), hidden.numel()
    addresses = torch.empty(num_choices, dtype=torch.int64, device=index.device)
    hand_over.publish[(1,)](
        index, weights, hidden, address_of, addresses, box.doorbell, box.done, box.choice,
        box.is_hit, box.weights, box.hidden, num_choices=num_choices,
        choice_width=1 << max(4, (num_choices - 1).bit_length()), num_experts=len(address_of),
        num_values=num_values, block_values=_PUBLISHED_AT_ONCE, rings=rings, num_warps=4,
    )  # fmt: skip
    return addresses


def wait_for(done: Tensor, gave_up: Tensor) -> None:
    """Hold the stream until `done` is 1, and reset it; counts in `gave_up` what never came."""
    has_pause = done.device.type == "cuda" or gave_up.device.type == "cuda"
    hand_over.wait_for[(1,)](
        done, gave_up, most_polls=_MOST_POLLS, has_pause=has_pause, num_warps=1
    )


def combine(
    rows: Tensor,
    results: Tensor,
    addresses: Tensor,
    index: Tensor,
    weights: Tensor,
    num_experts: int,
    out: Tensor,
) -> None:
    """Add the GPU's and the host's rows up in the router's order; see `hand_over.combine`.

    Its products and sums are not joined, as they are not on the CPU.
    """
    num_rows, num_cols = out.shape
    hand_over.combine[-(-num_cols // _COMBINE_COLS), num_rows](
        rows, results, addresses, index, weights, out, num_cols=num_cols, top_k=index.shape[1],
        num_experts=num_experts, block_cols=_COMBINE_COLS, enable_fp_fusion=False,
    )  # fmt: skip

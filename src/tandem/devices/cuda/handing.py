"""Launches the kernels by which a captured step hands a layer over to the host; never waits.

The mailbox's tensors are in mapped host memory, all others on the device.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.devices.cuda.signals import Signals
from tandem.experts.execution.look_ahead_routers import SCORINGS, LookAheadRouter
from tandem.triton_kernels import hand_over

# Few columns, so that all rows of a program are loaded at once: 8 programs for 2,048 values.
_COMBINE_COLS = 256
_COMBINE_WARPS = 2
_PUBLISHED_AT_ONCE = 1024
# Blocks of a router's matrix: one program for two experts, so that all of it is read at once.
_ROUTER_EXPERTS, _ROUTER_COLS = 2, 512
_LOOKS_OFF_GPU = 1 << 30  # for the interpreter, which has no clock


class WaitWords(NamedTuple):
    """The words that report expired waits to later layers and to the host; see `hand_over`."""

    turn: Tensor  # (1,) int32, on the device
    given_up: Tensor  # (1,) int32, mapped

    @classmethod
    def on(cls, device: torch.device, given_up: Tensor) -> "WaitWords":
        """Return words for a device; `given_up` must be in mapped memory."""
        with torch.inference_mode(False):
            return cls(torch.zeros(1, dtype=torch.int32, device=device), given_up)

    def begin_step(self) -> None:
        """Queue the reset of `turn`, before a step's first layer."""
        self.turn.zero_()


class MailboxTensors(NamedTuple):
    """One layer's part of a mailbox; all layers share `hidden`, `results` and `waits`."""

    doorbell: Tensor  # (1,) int32
    done: Tensor  # (1,) int32
    choice: Tensor  # (n_tokens, top_k) int32
    is_hit: Tensor  # (n_tokens, top_k) int32
    weights: Tensor  # (n_tokens, top_k) fp32
    fetched: Tensor  # (n_tokens, top_k) int64
    guessed: Tensor  # (1,) int32
    guess: Tensor  # (n_tokens, top_k) int32
    hidden: Tensor  # (n_tokens, hidden_size) in the model's dtype
    results: Tensor  # (n_tokens * top_k, hidden_size) fp32
    waits: WaitWords


class NextRouter(NamedTuple):
    """The next layer's router, and the input on which it is run ahead."""

    router: LookAheadRouter
    hidden: Tensor  # (n_tokens, hidden_size), what this layer's router has read


def hand_over_layer(
    box: MailboxTensors,
    signals: Signals,
    address_of: Tensor,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    hits: Callable[[Tensor, Tensor], None],
    *,
    layer: int,
    fetches: bool = False,
    next_router: NextRouter | None = None,
) -> Tensor:
    """Queue a whole layer; return the tensor that will hold its result, of the shape of `hidden`.

    `address_of` is (num_experts,) int64, 0 for experts that are not resident. `hits(addresses,
    rows)` must queue the computation of the experts at `addresses` (n_tokens * top_k,) into `rows`,
    and skip addresses of 0. With `fetches` the host may fetch misses meanwhile; after the wait,
    `hits` is called again, for the fetched experts. The choice that `next_router` predicts for the
    next layer is published after the doorbell.
    """
    inside = signals.wait_seconds
    addresses = publish(box, address_of, hidden, index, weights, rings=inside > 0)
    signals.ring(box.doorbell)
    if next_router is not None:
        publish_guess(box, next_router, index, len(address_of))
    rows = hidden.new_empty(len(addresses), hidden.shape[1], dtype=torch.float32)
    hits(addresses, rows)
    signals.wait(box.done)
    if fetches:
        num_experts = len(address_of)
        hits(
            take_fetched(box, addresses, index, num_experts, layer=layer, wait_seconds=inside), rows
        )
    out = torch.empty_like(hidden)
    combine(
        box, rows, addresses, index, weights, len(address_of), out, layer=layer, wait_seconds=inside
    )
    return out


def publish(
    box: MailboxTensors,
    address_of: Tensor,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    *,
    rings: bool,
) -> Tensor:
    """Publish a layer; return the addresses of its hits, (n_tokens * top_k,) int64, 0 for no hit.

    `address_of` is (num_experts,) int64. The kernel sets `done` to 1 if there is no miss, else to
    0. With `rings` the kernel itself sets the doorbell.
    """
    num_choices, num_values = index.numel(), hidden.numel()
    addresses = torch.empty(num_choices, dtype=torch.int64, device=index.device)
    hand_over.publish[(1,)](
        index, weights, hidden, address_of, addresses, box.doorbell, box.done, box.choice,
        box.is_hit, box.weights, box.hidden, num_choices=num_choices,
        choice_width=_choice_width(num_choices), num_experts=len(address_of),
        num_values=num_values, block_values=_PUBLISHED_AT_ONCE, rings=rings,
        on_gpu=index.is_cuda, num_warps=4,
    )  # fmt: skip
    return addresses


def publish_guess(
    box: MailboxTensors, next_router: NextRouter, index: Tensor, num_experts: int
) -> None:
    """Publish the next layer's likely choice, for all tokens but padding tokens.

    `index` is this layer's choice, in which padding tokens have no expert.
    """
    (weight, bias, residual, scoring), hidden = next_router
    num_tokens, num_cols = hidden.shape
    scores = torch.empty(num_tokens, len(weight), dtype=torch.float32, device=index.device)
    hand_over.ask[-(-len(weight) // _ROUTER_EXPERTS), num_tokens](
        hidden, residual, weight, weight if bias is None else bias, scores, num_cols=num_cols,
        num_experts=len(weight), block_cols=_ROUTER_COLS, block_experts=_ROUTER_EXPERTS,
        has_bias=bias is not None, scoring=SCORINGS.index(scoring), num_warps=4,
    )  # fmt: skip
    hand_over.publish_guess[(1,)](
        scores, index, box.guess, box.guessed, num_tokens=num_tokens, top_k=index.shape[1],
        num_experts=num_experts, num_scores=len(weight),
        width=1 << max(4, (len(weight) - 1).bit_length()), on_gpu=index.is_cuda, num_warps=1,
    )  # fmt: skip


def take_fetched(
    box: MailboxTensors,
    addresses: Tensor,
    index: Tensor,
    num_experts: int,
    *,
    layer: int,
    wait_seconds: float,
) -> Tensor:
    """Return the addresses (n_tokens * top_k,) of fetched misses, 0 for all other choices.

    The kernel writes these addresses to `addresses`, too. For `wait_seconds` see `combine`.
    """
    num_choices, new_addresses = index.numel(), torch.empty_like(addresses)
    hand_over.take_fetched[(1,)](
        box.done, box.waits.turn, box.waits.given_up, layer + 1, box.fetched, index, addresses,
        new_addresses, num_choices=num_choices, choice_width=_choice_width(num_choices),
        num_experts=num_experts, most=_most(wait_seconds, index), on_gpu=index.is_cuda, num_warps=1,
    )  # fmt: skip
    return new_addresses


def _choice_width(num_choices: int) -> int:
    return 1 << max(4, (num_choices - 1).bit_length())


def _most(wait_seconds: float, tensor: Tensor) -> int:
    """Return the longest wait in the kernel's unit: nanoseconds; off a GPU, a number of reads."""
    return round(wait_seconds * 1e9) if tensor.is_cuda or not wait_seconds else _LOOKS_OFF_GPU


def combine(
    box: MailboxTensors,
    rows: Tensor,
    addresses: Tensor,
    index: Tensor,
    weights: Tensor,
    num_experts: int,
    out: Tensor,
    *,
    layer: int,
    wait_seconds: float,
) -> None:
    """Queue the weighted sum of each token's results from GPU and host; it is written to `out`.

    Results are added in the order of the router's choice; as on the CPU, multiplications and
    additions are not fused. Unless `wait_seconds` is 0, the kernel itself waits for the host, for
    at most `wait_seconds`. See `hand_over.combine`.
    """
    num_tokens, num_cols = out.shape
    hand_over.combine[-(-num_cols // _COMBINE_COLS), num_tokens](
        box.done, box.waits.turn, box.waits.given_up, layer + 1, rows, box.results, addresses,
        index, weights, out, num_cols=num_cols, top_k=index.shape[1], num_experts=num_experts,
        block_cols=_COMBINE_COLS, most=_most(wait_seconds, out), on_gpu=out.is_cuda,
        num_warps=_COMBINE_WARPS, enable_fp_fusion=False,
    )  # fmt: skip

"""Convolutions and recurrences on a device that computes in torch: the reference of its kernels.

Tokens are those of neighbouring slots, as many of each, slot by slot. Nothing here waits for the
device, so that steps can be captured.
"""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.recurrent import Convolution, Recurrence

_LEAST_SQUARE = 1e-6  # beside the sum that a query's or key's length is the root of


class SlotTokens(NamedTuple):
    """Which slots a call's tokens are of."""

    first_slot: int
    num_each: int
    positions: Tensor
    """(slots,) int64: of each slot's first token, on the device. At 0 a slot begins with zeros;
    below that it is idle: its tokens give something, and its state stays as it is."""


class StateKernels(Protocol):
    """Operations on states (slots, ...) fp32, which they change; numbers are fp32, too.

    Weights lie (width, channels), factors (key_dim, value_dim) in memory, whatever their shape.
    """

    def convolve(
        self, operation: Convolution, states: Tensor, tokens: SlotTokens, x: Tensor
    ) -> Tensor:
        """Return what (n_tokens, channels) give; states are (slots, width - 1, channels)."""

    def recur(
        self,
        operation: Recurrence,
        states: Tensor,
        tokens: SlotTokens,
        value: Tensor,
        query: Tensor,
        key: Tensor,
        decay: Tensor,
        rate: Tensor | None = None,
    ) -> Tensor:
        """Return what tokens give, (n_tokens, heads, value_dim), as of `RecurrenceState.add`.

        States are (slots, heads, key_dim, value_dim).
        """


class TorchStates:
    """The same in torch."""

    def convolve(
        self, operation: Convolution, states: Tensor, tokens: SlotTokens, x: Tensor
    ) -> Tensor:
        """See `StateKernels.convolve`."""
        weight, bias, has_silu = operation
        num_each, width = tokens.num_each, weight.shape[1]
        kept, before = _kept(states, tokens)
        inputs = torch.cat([before, x.float().view(len(kept), num_each, -1)], 1)
        taps = [inputs[:, j : j + num_each] * weight[:, j] for j in range(width)]
        out = torch.stack(taps).sum(0)
        out = (out if bias is None else out + bias).to(x.dtype)
        _keep(kept, tokens, inputs[:, num_each:])
        return (F.silu(out) if has_silu else out).view(x.shape)

    def recur(
        self,
        operation: Recurrence,
        states: Tensor,
        tokens: SlotTokens,
        value: Tensor,
        query: Tensor,
        key: Tensor,
        decay: Tensor,
        rate: Tensor | None = None,
    ) -> Tensor:
        """See `StateKernels.recur`."""
        form, factor, skip = operation
        kept, state = _kept(states, tokens)
        group = form.num_heads // form.num_key_heads

        def by_slot(x: Tensor) -> Tensor:
            return x.float().view(len(kept), tokens.num_each, *x.shape[1:])

        def of_heads(x: Tensor, scale: float) -> Tensor:
            if form.is_normalised:
                wide = x.float()
                x = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _LEAST_SQUARE)
            return by_slot(x.float() * scale).repeat_interleave(group, 2)

        queries, keys, values = of_heads(query, form.scale), of_heads(key, 1.0), by_slot(value)
        kept_share = _kept_share(form.decay, by_slot(decay), factor)
        rates = None if rate is None else by_slot(rate)[..., None]
        outputs = []
        for t in range(tokens.num_each):
            state = state * kept_share[:, t]
            change = values[:, t]
            if form.is_delta:
                change = change - (state * keys[:, t, :, :, None]).sum(2)
            change = change if rates is None else change * rates[:, t]
            state = state + keys[:, t, :, :, None] * change[:, :, None]
            out = (state * queries[:, t, :, :, None]).sum(2)
            outputs.append(out if skip is None else out + skip * values[:, t])
        _keep(kept, tokens, state)
        return torch.stack(outputs, 1).view(value.shape).to(value.dtype)


def _kept(states: Tensor, tokens: SlotTokens) -> tuple[Tensor, Tensor]:
    """Return the slots' states as they lie, and as the tokens find them."""
    count = len(tokens.positions)
    kept = states[tokens.first_slot : tokens.first_slot + count]
    goes_on = (tokens.positions > 0).view(-1, *[1] * (kept.dim() - 1))
    return kept, torch.where(goes_on, kept, 0.0)


def _keep(kept: Tensor, tokens: SlotTokens, new: Tensor) -> None:
    is_busy = (tokens.positions >= 0).view(-1, *[1] * (kept.dim() - 1))
    kept.copy_(torch.where(is_busy, new, kept))


def _kept_share(kind: str, decay: Tensor, factor: Tensor | None) -> Tensor:
    """Return what is left of states, (slots, tokens, heads or 1, key_dim or 1, value_dim or 1)."""
    if kind == "head":
        return decay[..., None, None].exp()
    if kind == "key":
        return decay[..., None].exp()
    assert factor is not None
    return (decay[:, :, None, None] * factor.t()).exp()

"""Computes compressed keys in torch on a device; on CPUs, `csrc/compression.hpp` does.

Each slot has a ring that stores the values and biased gates of tokens by position. Besides the
windows that the next key needs, a ring has room for drafted tokens and one padding token, so that
rejecting drafted tokens changes nothing. Nothing here waits for the device, so that steps can be
captured.
"""

import torch
from torch import Tensor

from tandem.kernels.recurrent import Compression


def ring_shape(operation: Compression) -> tuple[int, ...]:
    """Return the shape of a slot's ring: (tokens, 2 for values and gates, width)."""
    num_tokens, *rest = operation.state_shape
    return num_tokens + 1, *rest  # a padding token follows the drafted ones


def compress_prompt(
    operation: Compression, ring: Tensor, first: int, values: Tensor, gates: Tensor
) -> Tensor:
    """Return the keys (n_tokens, dim) of a slot's tokens from position `first` on.

    `ring` is the slot's ring, which is updated. The keys of tokens that end no window are zeros.
    """
    ratio, span, kept, count = *_sizes(operation), len(ring), len(values)
    positions = torch.arange(first + 1 - span, first + count, device=values.device)
    new = _with_bias(operation, positions[span - 1 :], values, gates)
    tokens = torch.cat([ring[positions[: span - 1] % kept], new])
    last = positions[-min(kept, count) :]
    ring[last % kept] = new[-len(last) :]
    begin = ratio - 1 - first % ratio
    ends = torch.arange(begin, max(begin, count), ratio, device=values.device)
    of_windows = ends[:, None] + torch.arange(span, device=values.device)
    keys = values.new_zeros(count, values.shape[1] // operation.num_series)
    found = _keys(operation, tokens[of_windows], positions[of_windows] >= 0)
    keys[begin::ratio] = found.to(keys.dtype)
    return keys


def compress_step(
    operation: Compression,
    rings: Tensor,
    slots: Tensor,
    positions: Tensor,
    values: Tensor,
    gates: Tensor,
) -> Tensor:
    """Return the keys (n_tokens, dim) of tokens at the given slots and positions (n_tokens,).

    `rings` has the rings of all slots, which are updated. Keys of tokens that end no window are
    zeros.
    """
    ratio, span, kept = *_sizes(operation), rings.shape[1]
    rings[slots, positions % kept] = _with_bias(operation, positions, values, gates)
    at = positions[:, None] + torch.arange(1 - span, 1, device=values.device)
    keys = _keys(operation, rings[slots[:, None], at % kept], at >= 0)
    ends_window = (positions + 1) % ratio == 0
    return torch.where(ends_window[:, None], keys, 0.0).to(values.dtype)


def _sizes(operation: Compression) -> tuple[int, int]:
    """Return how many tokens a window has, and from how many tokens a key is computed."""
    ratio = len(operation.bias)
    return ratio, ratio * operation.num_series


def _with_bias(operation: Compression, positions: Tensor, values: Tensor, gates: Tensor) -> Tensor:
    """Return what a ring stores for tokens: (n_tokens, 2 for values and biased gates, width)."""
    bias = operation.bias[positions % len(operation.bias)]
    return torch.stack([values.float(), gates.float() + bias], 1)


def _keys(operation: Compression, tokens: Tensor, are_there: Tensor) -> Tensor:
    """Return keys (n, dim), each computed from tokens (n, tokens of a key, 2, width).

    `are_there` (n, tokens of a key) is false for tokens before a sequence's beginning, which get no
    weight.
    """
    bias, num_series = operation
    if num_series > 1:  # the first series belongs to the previous window, the second to its own
        before, own = tokens.split(len(bias), 1)
        dim = tokens.shape[3] // num_series
        tokens = torch.cat([before[..., :dim], own[..., dim:]], 1)
    values, gates = tokens.unbind(2)
    weights = gates.masked_fill(~are_there[..., None], float("-inf")).softmax(1)
    return (weights * values.masked_fill(~are_there[..., None], 0.0)).sum(1)

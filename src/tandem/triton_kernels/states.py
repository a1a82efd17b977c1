"""Layers with states on a GPU: launches kernels of `recurrent` and `compression`, and never waits.

Each method is one torch operation, so that recordings and captures see it.
"""

import torch
from torch import Tensor

from tandem.kernels.device_states import SlotTokens, StateMemory, logged_sizes
from tandem.kernels.recurrent import (
    MOST_DRAFTED,
    Compression,
    Convolution,
    Recurrence,
    RecurrenceForm,
)
from tandem.triton_kernels import compression, recurrent

_BLOCK_CHANNELS = 128
_BLOCK_TOKENS = 16
_ELEMENTS = 1024  # elements of a state in one program's registers, at least
# Elements in one warp's registers; on cards of 12.0, twice as many would spill.
_WARP_ELEMENTS = 512
_LEAST_VALUES, _MOST_VALUES = 8, 64
_WINDOW_ELEMENTS = 4096  # elements of a window's tokens in one program's registers, at most
_WINDOW_WARPS = 8
_MOST_COLUMNS = 128  # columns of a key


class TritonStates:
    """Advances states with Triton kernels; see `tandem.kernels.device_states.StateKernels`."""

    loops_on_device = True

    def convolve(
        self, operation: Convolution, memory: StateMemory, tokens: SlotTokens, x: Tensor
    ) -> Tensor:
        """See `StateKernels.convolve`."""
        weight, bias, has_silu = operation
        result: Tensor = _convolve(*memory, tokens.runs, x, weight, bias, has_silu, tokens.most)
        return result

    def recur(
        self, operation: Recurrence, memory: StateMemory, tokens: SlotTokens, *inputs: Tensor
    ) -> Tensor:
        """See `StateKernels.recur`."""
        (form, factor, skip), (*four, rate) = operation, (*inputs, None)[:5]
        result: Tensor = _recur(
            *memory, tokens.runs, *four, rate, factor, skip,
            form.decay, form.is_delta, form.is_normalised, form.scale,
        )  # fmt: skip
        return result

    def compress(
        self,
        operation: Compression,
        rings: Tensor,
        slots: Tensor,
        positions: Tensor,
        values: Tensor,
        gates: Tensor,
    ) -> Tensor:
        """See `StateKernels.compress`."""
        bias, num_series = operation
        result: Tensor = _compress(rings, slots, positions, values, gates, bias, num_series)
        return result


@torch.library.custom_op("tandem::compress", mutates_args=("rings",))
def _compress(
    rings: Tensor,
    slots: Tensor,
    positions: Tensor,
    values: Tensor,
    gates: Tensor,
    bias: Tensor,
    num_series: int,
) -> Tensor:
    """Store tokens' values and gates (n_tokens, series * dim); return compressed keys.

    The keys are (n_tokens, dim): a window's key is at the token that ends it, zeros elsewhere.
    """
    values, gates = (x if x.stride(1) == 1 else x.contiguous() for x in (values, gates))
    (ratio, width), num_tokens = bias.shape, len(values)
    dim, block_tokens = width // num_series, _power_of_two(ratio * num_series)
    block_dim = min(_MOST_COLUMNS, max(1, _WINDOW_ELEMENTS // block_tokens))
    out = values.new_empty(num_tokens, dim)
    compression.compress_tokens[-(-dim // block_dim), num_tokens](
        values, gates, bias, rings, slots, positions, out, values.stride(0), gates.stride(0),
        ratio=ratio, num_series=num_series, kept=rings.shape[1], dim=dim,
        block_tokens=block_tokens, block_dim=block_dim, num_warps=_WINDOW_WARPS,
    )  # fmt: skip
    return out


@torch.library.custom_op("tandem::convolve", mutates_args=("states", "log"))
def _convolve(
    states: Tensor,
    log: Tensor,
    runs: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    has_silu: bool,
    most: int,
) -> Tensor:
    """Return the convolution of x (n_tokens, channels); update the slots' states and logs."""
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    channels, width = weight.shape
    channel_blocks, token_blocks = -(-channels // _BLOCK_CHANNELS), -(-most // _BLOCK_TOKENS)
    # All blocks of tokens may read the old state, so it is overwritten after them.
    launches = [(token_blocks, 1, int(token_blocks == 1))]
    launches += [(1, 0, 1)] if token_blocks > 1 else []
    for num_blocks, computes, keeps in launches:
        recurrent.convolve_tokens[channel_blocks, num_blocks, len(runs)](
            x, weight, x if bias is None else bias, states, log, runs, out, computes, keeps,
            x.stride(0), channels=channels, width=width, has_bias=bias is not None,
            has_silu=has_silu, most_drafted=MOST_DRAFTED, block_channels=_BLOCK_CHANNELS,
            block_tokens=_BLOCK_TOKENS, num_warps=_BLOCK_CHANNELS // 32,
        )  # fmt: skip
    return out


@torch.library.custom_op("tandem::recur", mutates_args=("states", "log"))
def _recur(
    states: Tensor,
    log: Tensor,
    runs: Tensor,
    value: Tensor,
    query: Tensor,
    key: Tensor,
    decay: Tensor,
    rate: Tensor | None,
    factor: Tensor | None,
    skip: Tensor | None,
    decay_kind: str,
    is_delta: bool,
    is_normalised: bool,
    scale: float,
) -> Tensor:
    """Advance the slots' states by the runs' tokens; return the results, shaped like `value`."""
    value, query, key = (x if x.stride(2) == 1 else x.contiguous() for x in (value, query, key))
    decay, rate = decay.contiguous(), None if rate is None else rate.contiguous()
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    _, num_heads, key_dim, value_dim = states.shape
    form = RecurrenceForm(num_heads, key.shape[1], key_dim, value_dim, decay_kind)
    _, *others = logged_sizes(form)
    # Width of the logged keys, whose heads the model may repeat.
    logged_keys = log.shape[3] - sum(others)
    width, values = _tile(key_dim, value_dim)
    recurrent.recur_tokens[-(-value_dim // values), num_heads, len(runs)](
        value, query, key, decay, value if rate is None else rate,
        value if factor is None else factor, value if skip is None else skip,
        states, log, runs, out, value.stride(0), value.stride(1),
        query.stride(0), query.stride(1), key.stride(0), key.stride(1),
        num_heads=num_heads, num_key_heads=form.num_key_heads,
        num_logged_keys=logged_keys // key_dim, key_dim=key_dim, value_dim=value_dim,
        num_decays=others[1] // num_heads,
        num_logged=log.shape[3], most_drafted=MOST_DRAFTED, decay_kind=decay_kind,
        is_delta=is_delta, is_normalised=is_normalised, scale=scale,
        has_rate=rate is not None, has_skip=skip is not None, key_width=width,
        block_values=values, num_warps=max(1, width * values // _WARP_ELEMENTS),
    )  # fmt: skip
    return out


def _tile(key_dim: int, value_dim: int) -> tuple[int, int]:
    """Return the size of a program's tile of a state, (key dims, value dims): powers of two."""
    width = _power_of_two(key_dim)
    most = min(_MOST_VALUES, max(_LEAST_VALUES, _ELEMENTS // width))
    return width, min(most, _power_of_two(value_dim))


def _power_of_two(count: int) -> int:
    return max(_LEAST_VALUES, 1 << (count - 1).bit_length())

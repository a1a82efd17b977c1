"""Convolutions and recurrences in torch on a device: the reference of the device's kernels.

The tokens of a call form runs, each of consecutive tokens of one slot. A run begins with its
certain tokens; the tokens after them are drafts, which may be rejected. The state is stored after
the last certain token, drafts are logged, and the slot's next run repeats the accepted drafts.
Nothing here waits for the device, so that steps can be captured.
"""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.device_compression import compress_step
from tandem.kernels.recurrent import (
    MOST_DRAFTED,
    Compression,
    Convolution,
    Recurrence,
    RecurrenceForm,
    StateOperation,
)

_LEAST_SQUARE = 1e-6  # added to the square sum before the root of a query's or key's length


class Run(NamedTuple):
    """Consecutive tokens of one slot within a call."""

    slot: int
    first: int
    """Index of the first token in the call."""
    num_tokens: int
    num_certain: int
    """The slot's state is stored after this many tokens; later tokens are logged. 0 marks an idle
    run, which has outputs but stores nothing; its slot and half must be those of the first run."""
    num_again: int = -1
    """Number of logged tokens to repeat first; -1: the run begins with a state of zeros."""
    half: int = 0
    """The half of the slot's log to read; the run writes the other half."""


class SlotTokens(NamedTuple):
    """The runs that the tokens of a call form."""

    runs: Tensor
    """(n_runs, 6) int64 on the device, each a `Run`; the first run must not be idle."""
    most: int
    """The largest number of tokens in a run."""
    have_log: bool = True
    """Whether some tokens are repeated or logged; kernels that loop on the device read this from
    `runs` instead."""


class StateMemory(NamedTuple):
    """The fp32 memory of an operation: states and logs."""

    states: Tensor
    """(slots, width - 1, channels), or (slots, heads, key_dim, value_dim)"""
    log: Tensor
    """(slots, 2, MOST_DRAFTED, `logged_values`)"""


class StateKernels(Protocol):
    """Computes operations with states on a device; all numbers in memory are fp32.

    Whatever the shapes of their tensors, a convolution's weights must lie in memory as (width,
    channels), and a recurrence's factors as (key_dim, value_dim).
    """

    loops_on_device: bool
    """Whether kernels loop over a run's tokens on the device, so that launches fit any run."""

    def convolve(
        self, operation: Convolution, memory: StateMemory, tokens: SlotTokens, x: Tensor
    ) -> Tensor:
        """Advance the states by x (n_tokens, channels); return the outputs in the same shape."""

    def recur(
        self, operation: Recurrence, memory: StateMemory, tokens: SlotTokens, *inputs: Tensor
    ) -> Tensor:
        """Advance the states by the tokens; return the outputs (n_tokens, heads, value_dim).

        `inputs` are values, queries, keys, decays and optionally rates, as in
        `RecurrenceState.add`.
        """

    def compress(
        self,
        operation: Compression,
        rings: Tensor,
        slots: Tensor,
        positions: Tensor,
        values: Tensor,
        gates: Tensor,
    ) -> Tensor:
        """Update the rings; return the tokens' keys (n_tokens, dim), as `compress_step` does."""


def logged_values(operation: StateOperation) -> int:
    """Return how many values are logged for a drafted token."""
    if isinstance(operation, Convolution):
        return len(operation.weight)
    if isinstance(operation, Compression):
        return 0  # tokens are stored by position
    return sum(logged_sizes(operation.form))


def logged_sizes(form: RecurrenceForm) -> tuple[int, int, int, int]:
    """Return how many numbers are logged for a token's keys, values, decays and rates."""
    values = form.num_heads * form.value_dim
    each = {"head": 1, "key": form.key_dim, "pair": form.value_dim}[form.decay]
    return form.num_key_heads * form.key_dim, values, form.num_heads * each, form.num_heads


class TorchStates:
    """The operations of `StateKernels` in torch."""

    loops_on_device = False

    def convolve(
        self, operation: Convolution, memory: StateMemory, tokens: SlotTokens, x: Tensor
    ) -> Tensor:
        """See `StateKernels.convolve`."""
        weight, bias, has_silu = operation
        runs, before = _Runs(tokens, len(x)), weight.shape[1] - 1
        inputs = runs.states(memory)  # (runs, tokens, channels)
        if tokens.have_log:
            inputs = torch.cat([inputs, runs.logged(memory)], 1)
            inputs = _from(inputs, runs.num_again.clamp(min=0), before)
        inputs = torch.cat([inputs, runs.by_run(x.float())], 1)
        taps = [inputs[:, j : j + tokens.most] * weight[:, j] for j in range(before + 1)]
        out = torch.stack(taps).sum(0)
        out = runs.by_token((out if bias is None else out + bias).to(x.dtype))
        drafted = _from(inputs, before + runs.num_certain, MOST_DRAFTED)
        runs.keep(memory, _from(inputs, runs.num_certain, before), drafted)
        return F.silu(out) if has_silu else out

    def recur(
        self, operation: Recurrence, memory: StateMemory, tokens: SlotTokens, *inputs: Tensor
    ) -> Tensor:
        """See `StateKernels.recur`."""
        (form, factor, skip), (value, query, key, decay, *rate) = operation, inputs
        runs, state = _Runs(tokens, len(value)), _Stepped(form, factor, bool(rate))
        rates = rate[0] if rate else value.new_ones(value.shape[:2])
        updates = runs.by_run(
            torch.cat([x.flatten(1).float() for x in (key, value, decay, rates)], 1)
        )
        queries = runs.by_run(_heads(form, query.float(), form.scale))
        now = runs.states(memory)
        if tokens.have_log:
            logged = runs.logged(memory)
            for t in range(MOST_DRAFTED):
                is_again = runs.num_again.gt(t).view(-1, 1, 1, 1)
                now = torch.where(is_again, state(now, logged[:, t]), now)
        kept, outputs = now, []
        for t in range(tokens.most):
            now = state(now, updates[:, t])
            kept = torch.where(runs.num_certain.eq(t + 1).view(-1, 1, 1, 1), now, kept)
            out = (now * queries[:, t, :, :, None]).sum(2)
            outputs.append(out if skip is None else out + skip * state.values(updates[:, t]))
        runs.keep(memory, kept, _from(updates, runs.num_certain, MOST_DRAFTED))
        return runs.by_token(torch.stack(outputs, 1)).to(value.dtype)

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
        return compress_step(operation, rings, slots, positions, values, gates)


class _Runs:
    """Rearranges values between a call's tokens and its runs; loads and stores the runs' states."""

    def __init__(self, tokens: SlotTokens, num_tokens: int) -> None:
        self._has_log, self._most, runs = tokens.have_log, tokens.most, tokens.runs
        self._slot, first, count, self.num_certain, self.num_again, self._half = runs.unbind(1)
        place = torch.arange(self._most, device=runs.device)
        self._token_of = (first[:, None] + place).clamp(max=num_tokens - 1)
        token = torch.arange(num_tokens, device=runs.device)[:, None]
        self._run_of = ((first <= token) & (token < first + count)).to(torch.int8).argmax(1)
        self._place_of = (token[:, 0] - first[self._run_of]).clamp(0, self._most - 1)
        number = torch.arange(len(runs), device=runs.device)
        self._kept_from = torch.where(self.num_certain > 0, number, 0)

    def by_run(self, values: Tensor) -> Tensor:
        """Rearrange values of the call's tokens (n_tokens, ...) to (runs, tokens of a run, ...)."""
        return values[self._token_of]

    def by_token(self, values: Tensor) -> Tensor:
        """Undo `by_run`: return values (runs, tokens of a run, ...) as (n_tokens, ...)."""
        return values[self._run_of, self._place_of]

    def states(self, memory: StateMemory) -> Tensor:
        """Return the states of the runs' slots; zeros for runs that begin a sequence."""
        found = memory.states[self._slot]
        return torch.where((self.num_again >= 0).view(-1, *[1] * (found.dim() - 1)), found, 0.0)

    def logged(self, memory: StateMemory) -> Tensor:
        """Return the logs of the runs' slots: (runs, MOST_DRAFTED, values)."""
        return memory.log[self._slot, self._half]

    def keep(self, memory: StateMemory, states: Tensor, drafted: Tensor) -> None:
        """Store the states and logs of all runs that are not idle."""
        # Idle runs repeat what the first run writes.
        memory.states[self._slot] = states[self._kept_from]
        if self._has_log:
            memory.log[self._slot, 1 - self._half] = drafted[self._kept_from]


class _Stepped:
    """Advances states (runs, heads, key_dim, value_dim) by tokens in their logged form."""

    def __init__(self, form: RecurrenceForm, factor: Tensor | None, has_rate: bool) -> None:
        self._form, self._factor, self._has_rate = form, factor, has_rate

    def __call__(self, state: Tensor, token: Tensor) -> Tensor:
        """Return the states after tokens (runs, logged values)."""
        form = self._form
        key, _, decay, rate = token.split(logged_sizes(form), -1)
        keys = _heads(form, key.unflatten(-1, (form.num_key_heads, form.key_dim)), 1.0)[..., None]
        state = state * self._share(decay)
        change = self.values(token)
        if form.is_delta:
            change = change - (state * keys).sum(2)
        change = change * rate[..., None] if self._has_rate else change
        return state + keys * change[:, :, None]

    def values(self, token: Tensor) -> Tensor:
        """Return the values in tokens (runs, logged values): (runs, heads, value_dim)."""
        _, value, _, _ = token.split(logged_sizes(self._form), -1)
        values: Tensor = value.unflatten(-1, (self._form.num_heads, self._form.value_dim))
        return values

    def _share(self, decay: Tensor) -> Tensor:
        """Return exp(decay) in a shape that can be multiplied with states.

        The shape is (runs, heads or 1, key_dim or 1, value_dim or 1). Decay by pair is multiplied
        by the recurrence's factor first.
        """
        if self._form.decay == "head":
            return decay[..., None, None].exp()
        if self._form.decay == "key":
            by_key: Tensor = decay.unflatten(-1, (self._form.num_heads, self._form.key_dim))
            return by_key[..., None].exp()
        assert self._factor is not None
        return (decay[:, None, None] * self._factor.t()).exp()


def _heads(form: RecurrenceForm, x: Tensor, scale: float) -> Tensor:
    """Return queries or keys `x` (..., key heads, key_dim) times `scale`, repeated for all heads.

    If `form.is_normalised`, each is first normalised to length 1.
    """
    if form.is_normalised:
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LEAST_SQUARE)
    return (x * scale).repeat_interleave(form.num_heads // form.num_key_heads, -2)


def _from(x: Tensor, first: Tensor, count: int) -> Tensor:
    """Return `count` tokens of each run in x (runs, tokens, ...), from `first` (runs,) on.

    Where a run has fewer tokens after `first`, the last token of x is repeated.
    """
    place = first[:, None] + torch.arange(count, device=x.device)
    run = torch.arange(len(x), device=x.device)[:, None]
    return x[run, place.clamp(max=x.shape[1] - 1)]

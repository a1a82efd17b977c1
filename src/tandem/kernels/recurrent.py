"""Layers on the CPU with a state from token to token: convolutions, recurrences, compressions.

The tokens of several sequences are concatenated; each sequence has its state in a slot, in fp32
(`csrc/recurrent.hpp` and `csrc/compression.hpp` have the equations).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads

_BLOCK = 16  # values of a head whose states are adjacent
MOST_WIDTH = 16  # taps of a convolution
DECAY_KINDS = {"head": 0, "key": 1, "pair": 2}  # the numbers of DecayKind in C++
MOST_DRAFTED = 7  # drafted tokens of a slot in one call, after a certain one; the same as in C++
_MOST_KEY_DIM = 512
_Native = _native.ShortConvolution | _native.Recurrence


class Convolution(NamedTuple):
    """A depthwise causal convolution, (n_tokens, channels) -> the same shape."""

    weight: Tensor
    """(channels, width), the weight of the newest input last"""
    bias: Tensor | None
    """(channels,)"""
    has_silu: bool


class RecurrenceForm(NamedTuple):
    """The sizes and options of a linear recurrence; its tensors are in `Recurrence`."""

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    decay: str
    """What in a state has a decay of its own: each "head", each "key" dimension of a head, or each
    "pair" of a key and a value dimension."""
    is_delta: bool = False
    """Whether the delta rule applies: the state's value for a key is subtracted from the new
    value."""
    is_normalised: bool = False
    """Whether queries and keys are normalised to length 1."""
    scale: float = 1.0
    """Factor of queries."""


class Recurrence(NamedTuple):
    """A linear recurrence: each head has a state S (key_dim, value_dim), which tokens advance.

    S = e^decay * S; S += key (x) rate * (value - key S); out = query S + skip * value, where key S
    is omitted unless `is_delta`.
    """

    form: RecurrenceForm
    factor: Tensor | None = None
    """Factor (value_dim, key_dim) of decays by pair."""
    skip: Tensor | None = None
    """(heads, value_dim)"""


class Compression(NamedTuple):
    """One key per window of tokens, from values and gates: (n_tokens, series * dim) each.

    The result is (n_tokens, dim). The token that ends a window gets the window's key: the sum of
    the values weighted by the softmax of their gates. With two series, a key uses the first series
    of the previous window's tokens and the second series of its own window's. Other tokens get
    zeros.
    """

    bias: Tensor
    """(tokens of a window, series * dim), added to the gates"""
    num_series: int

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of a slot's state: (tokens, 2 for values and gates, width)."""
        ratio, width = self.bias.shape
        return self.num_series * ratio + MOST_DRAFTED, 2, width


StateOperation = Convolution | Recurrence | Compression


class StateTokens(NamedTuple):
    """The slots and positions of a call's tokens, (n_tokens,) int64 each.

    Tokens of one slot must be consecutive; at position 0 a slot begins with a state of zeros.
    """

    slots: Tensor
    positions: Tensor
    have_drafts: bool = False
    """Whether all tokens of a slot but the first are drafts: the slot's state then excludes the
    drafts, and the next call repeats the first `LayerState.kept` of the drafts."""


class LayerState(ABC):
    """One operation of a layer with its states, which each call advances."""

    states: Tensor
    """(slots, ...) fp32"""
    kept: Tensor
    """(slots,) int64: how many of a slot's drafted tokens its state must still advance over"""
    log: Tensor
    """(slots, drafted tokens, ...) fp32: the data to repeat drafted tokens"""
    _output_shape: tuple[int, ...]
    """The shape of one token's output."""

    @abstractmethod
    def add(
        self,
        program: _native.Program,
        tokens: StateTokens,
        inputs: Sequence[Tensor],
        output: Tensor,
    ) -> None:
        """Add a call to a program, with arguments as in `__call__`; the result goes to `output`."""

    def __call__(
        self, threads: CpuThreads, tokens: StateTokens, inputs: Sequence[Tensor]
    ) -> Tensor:
        """Advance the slots' states by the tokens; return the outputs."""
        first = inputs[0]
        shape = (len(first), *self._output_shape)
        output = torch.empty(shape, dtype=first.dtype, device="cpu")
        program = threads.program()
        self.add(program, tokens, inputs, output)
        program.run()
        return output

    def _keep_drafts(self, native: _Native, num_values: int) -> None:
        """Allocate `kept` and `log`, with `num_values` values for each drafted token."""
        self.kept = torch.zeros(len(self.states), dtype=torch.int64, device="cpu")
        self.log = torch.zeros(len(self.states), MOST_DRAFTED, num_values, device="cpu")
        native.keep_drafts(self.kept, self.log)


class ConvolutionState(LayerState):
    """A convolution with the last inputs of each slot."""

    def __init__(self, num_slots: int, operation: Convolution) -> None:
        """Start with zeros in all slots; raises `ValueError` for a width without a kernel."""
        weight, bias, has_silu = operation
        channels, width = weight.shape
        if not 2 <= width <= MOST_WIDTH:
            raise ValueError(f"a convolution over {width} tokens is not one of 2 to {MOST_WIDTH}")
        self._output_shape = (channels,)
        self._weight = weight.detach().float().t().contiguous()
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self.states = torch.zeros(num_slots, width - 1, channels, device="cpu")
        self._native = _native.ShortConvolution(self._weight, self._bias, has_silu, self.states)
        self._keep_drafts(self._native, channels)

    def add(
        self,
        program: _native.Program,
        tokens: StateTokens,
        inputs: Sequence[Tensor],
        output: Tensor,
    ) -> None:
        """Add a call to a program: `inputs` is (n_tokens, channels), fp32 or bf16."""
        (x,) = inputs
        program.add_convolution(self._native, *tokens, x, output)


class RecurrenceState(LayerState):
    """A recurrence with the state of each slot."""

    def __init__(self, num_slots: int, operation: Recurrence) -> None:
        """Start with zeros in all slots; raises `ValueError` for a key size without a kernel."""
        form, factor, skip = operation
        if form.key_dim > _MOST_KEY_DIM:
            raise ValueError(f"keys of {form.key_dim} values; expected at most {_MOST_KEY_DIM}")
        self.form, self._output_shape = form, (form.num_heads, form.value_dim)
        self._blocks = -(-form.value_dim // _BLOCK)
        shape = (num_slots, form.num_heads, self._blocks, form.key_dim, _BLOCK)
        self.states = torch.zeros(shape, device="cpu")
        self._skip = None if skip is None else skip.detach().float().contiguous()
        self._factor = None if factor is None else self._in_blocks(factor)
        self._native = _native.Recurrence(
            form.num_heads,
            form.num_key_heads,
            form.key_dim,
            form.value_dim,
            DECAY_KINDS[form.decay],
            form.is_delta,
            form.is_normalised,
            form.scale,
            self._factor,
            self._skip,
            self.states,
        )
        self._keep_drafts(self._native, self._native.logged_values)

    def add(
        self,
        program: _native.Program,
        tokens: StateTokens,
        inputs: Sequence[Tensor],
        output: Tensor,
    ) -> None:
        """Add a call to a program.

        `inputs` are value (n_tokens, heads, value_dim), query and key (n_tokens, key heads,
        key_dim), decay in fp32, and optionally rate (n_tokens, heads). Decay is (n_tokens, heads);
        by key it is (n_tokens, heads, key_dim), by pair (n_tokens, value_dim).
        """
        value, query, key, decay, *rates = inputs
        rate = rates[0] if rates else None
        program.add_recurrence(self._native, *tokens, query, key, value, decay, rate, output)

    def _in_blocks(self, factor: Tensor) -> Tensor:
        """Reorder a factor (value_dim, key_dim) to (blocks, key_dim, values of a block)."""
        padded = torch.zeros(self._blocks * _BLOCK, self.form.key_dim, device="cpu")
        padded[: len(factor)] = factor.detach()
        return padded.view(self._blocks, _BLOCK, -1).transpose(1, 2).contiguous()


class CompressionState(LayerState):
    """A compression, with the last tokens of each slot, from which later keys are computed.

    Tokens are stored by position, with room for drafted tokens, so that rejecting drafted tokens
    changes nothing.
    """

    def __init__(self, num_slots: int, operation: Compression) -> None:
        """Start with zeros in all slots."""
        bias, num_series = operation
        self._output_shape = (bias.shape[1] // num_series,)
        self._bias = bias.detach().float().contiguous()
        self.states = torch.zeros(num_slots, *operation.state_shape, device="cpu")
        self.kept = torch.zeros(num_slots, dtype=torch.int64, device="cpu")
        self.log = torch.zeros(num_slots, 0, device="cpu")
        self._native = _native.WindowCompression(num_series, self._bias, self.states)

    def add(
        self,
        program: _native.Program,
        tokens: StateTokens,
        inputs: Sequence[Tensor],
        output: Tensor,
    ) -> None:
        """Add a call to a program: `inputs` are values and gates, fp32 or bf16."""
        values, gates = inputs
        slots, positions, _ = tokens
        program.add_compression(self._native, slots, positions, values, gates, output)


def new_layer_state(num_slots: int, operation: StateOperation) -> LayerState:
    """Return an operation with zeroed states for `num_slots` slots."""
    if isinstance(operation, Convolution):
        return ConvolutionState(num_slots, operation)
    if isinstance(operation, Compression):
        return CompressionState(num_slots, operation)
    return RecurrenceState(num_slots, operation)

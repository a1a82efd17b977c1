"""The native CPU kernels: all experts of a layer in one call. Checks what C++ takes on trust.

The result for a (token, expert) row does not depend on the other rows of the call, nor on the
number of threads.
"""

import functools
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from tandem.core.errors import ConfigError, ModelError
from tandem.core.registry import nearest_names
from tandem.kernels import _native
from tandem.kernels.formats.expert import ExpertLayout
from tandem.kernels.formats.weight_format import Kind

# The numbers of csrc/packed.hpp.
FORMAT_NUMBERS: dict[Kind, int] = {
    "bf16": 0,
    "int8": 1,
    "int4": 2,
    "int4z": 3,
    "mxfp4": 4,
    "fp16": 5,
    "fp8": 6,
}


class ActivationKind(IntEnum):
    """The activations that the kernels know; the numbers of csrc/kernels.hpp."""

    SWIGLU = 0
    GELU_TANH_GATE = 1
    RELU2 = 2


@dataclass(frozen=True, slots=True)
class NativeActivation:
    """An activation with its parameters.

    SWIGLU is g * sigmoid(alpha * g) * (u + offset) with g = min(gate, limit) and u = up clamped to
    -limit..limit; the defaults are plain SiLU gating.
    """

    kind: ActivationKind
    alpha: float = 1.0
    limit: float = float("inf")
    offset: float = 0.0

    @property
    def is_gated(self) -> bool:
        """Tell whether the first projection gives a gate and a value."""
        return self.kind is not ActivationKind.RELU2


def allocate_buffers(num_experts: int, num_bytes: int) -> Tensor:
    """Return zeroed buffers (num_experts, num_bytes) uint8, on huge pages where there are any."""
    buffers = torch.empty((num_experts, num_bytes), dtype=torch.uint8)
    _native.advise_huge_pages(buffers.data_ptr(), buffers.nbytes)
    return buffers.zero_()


def is_supported(layout: ExpertLayout) -> bool:
    """Tell whether the kernels read a layout's format."""
    return layout.format.kind in FORMAT_NUMBERS


class NativeExperts:
    """The kernels with their threads. One call at a time; any number of layers."""

    def __init__(self, *, num_threads: int, isa: str = "") -> None:
        """Start `num_threads` - 1 threads; `isa` names an instruction set, "" takes the best."""
        available = _native.available_isas()
        if isa and isa not in available:
            raise ConfigError(
                f"instruction set {isa!r} is not on this processor; {nearest_names(isa, available)}"
            )
        self._engine = _native.ExpertEngine(num_threads, isa)

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self._engine.isa

    @property
    def num_threads(self) -> int:
        """The threads in use, the caller's included."""
        return self._engine.num_threads

    def compute(
        self,
        layout: ExpertLayout,
        store: Tensor,
        activation: NativeActivation,
        hidden: Tensor,
        experts: Tensor,
        row_begin: Tensor,
        row_token: Tensor,
    ) -> Tensor:
        """Return one fp32 row per (token, expert): (num_rows, hidden_size).

        `store` is (num_experts, layout.num_bytes) uint8, `hidden` (n_tokens, hidden_size) fp32.
        The chosen `experts` (n,) int64 have rows `row_begin[i]`..`row_begin[i + 1]` - 1, and row j
        is of token `row_token[j]`; both int32. Raises `ModelError` for an expert, row or token that
        does not exist.
        """
        assert store.dtype == torch.uint8
        assert store.shape[1] == layout.num_bytes
        assert store.is_contiguous()
        out = torch.empty(row_token.numel(), layout.hidden_size)
        _require_experts(experts, len(store))
        addresses = experts * layout.num_bytes + store.data_ptr()
        self.compute_at(layout, addresses, activation, hidden, row_begin, row_token, out)
        return out

    def compute_at(
        self,
        layout: ExpertLayout,
        addresses: Tensor,
        activation: NativeActivation,
        hidden: Tensor,
        row_begin: Tensor,
        row_token: Tensor,
        out: Tensor,
    ) -> None:
        """Do the same for experts at `addresses` (n,) int64, anywhere in memory, into `out`."""
        assert hidden.dtype == out.dtype == torch.float32
        assert hidden.shape[1] == out.shape[1] == layout.hidden_size
        assert row_begin.dtype == row_token.dtype == torch.int32
        assert addresses.dtype == torch.int64
        assert row_begin.numel() == addresses.numel() + 1
        assert out.shape[0] == row_token.numel()
        assert out.is_contiguous()
        assert activation.is_gated == layout.is_gated
        hidden = hidden.contiguous()
        row_begin, row_token = row_begin.contiguous(), row_token.contiguous()
        addresses = addresses.contiguous()
        try:
            self._engine.run(
                _native_layout(layout), activation.kind, activation.alpha, activation.limit,
                activation.offset, addresses.numel(), hidden.shape[0], row_token.numel(),
                addresses.data_ptr(), row_begin.data_ptr(), row_token.data_ptr(),
                hidden.data_ptr(), out.data_ptr(),
            )  # fmt: skip
        except ValueError as error:  # rows or tokens that do not exist
            raise ModelError(f"the routing of a layer is damaged: {error}") from error

    def read_all(self, data: Tensor) -> int:
        """Read a tensor's memory with all threads, for timing; returns the bytes read."""
        return self._engine.read_all(data.data_ptr(), data.nbytes)

    def multiply(self, *, is_int8: bool, count_per_thread: int) -> int:
        """Multiply registers (int8, else bf16), for timing; returns the operations done."""
        return self._engine.multiply(is_int8, count_per_thread)


def _require_experts(experts: Tensor, num_experts: int) -> None:
    if experts.numel() == 0:
        return
    lowest, highest = torch.aminmax(experts)
    if lowest < 0 or highest >= num_experts:
        found = int(lowest if lowest < 0 else highest)
        raise ModelError(
            f"the routing of a layer chose expert {found}, expected 0 to {num_experts - 1}"
        )


@functools.lru_cache(maxsize=64)
def _native_layout(layout: ExpertLayout) -> _native.ExpertLayout:
    fmt = layout.format
    native = _native.ExpertLayout()
    native.format = FORMAT_NUMBERS[fmt.kind]
    native.group = fmt.group_size or 0
    native.hidden_size = layout.hidden_size
    native.hidden_cols = fmt.padded_cols(layout.hidden_size)
    native.inner_rows = fmt.padded_rows(layout.intermediate_size)
    native.inner_cols = fmt.padded_cols(layout.intermediate_size)
    native.is_gated = layout.is_gated
    native.up_data, native.up_scales = layout.up.offset, layout.up_scales.offset
    native.down_data, native.down_scales = layout.down.offset, layout.down_scales.offset
    native.up_bias = layout.up_bias.offset if layout.has_bias else -1
    native.down_bias = layout.down_bias.offset if layout.has_bias else -1
    return native

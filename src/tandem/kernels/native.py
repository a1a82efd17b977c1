"""The native CPU kernels: all experts of a layer in one call.

The result for a (token, expert) pair does not depend on the number of threads, nor on the other
pairs of the call: every instruction set adds in a fixed order, whatever the number of tokens.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.kernels import _native
from tandem.kernels.formats.expert import ExpertLayout, Section
from tandem.kernels.formats.weight_format import ROWS_PER_BLOCK, WeightFormat

TOKEN_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The dtypes that the experts' native calls read and write, by their numbers in csrc/values.hpp."""


class ActivationKind(IntEnum):
    """The activations that the kernels compute; numbers are those of csrc/kernels.hpp."""

    SWIGLU = 0
    GELU_TANH_GATE = 1
    RELU2 = 2
    LIMITED_SILU = 3
    SOFTCAPPED = 4


@dataclass(frozen=True, slots=True)
class NativeActivation:
    """An activation with its parameters.

    SWIGLU is g * sigmoid(alpha * g) * (u + offset) with g = min(gate, limit) and u = up clamped to
    -limit..limit; the defaults are plain SiLU gating. LIMITED_SILU is min(silu(g), limit) * u,
    SOFTCAPPED c(g, alpha) * sigmoid(g) * c(u, limit) with c(x, cap) = cap * tanh(x / cap).
    """

    kind: ActivationKind
    alpha: float = 1.0
    limit: float = float("inf")
    offset: float = 0.0

    @property
    def is_gated(self) -> bool:
        """Whether the first projection gives a gate and a value."""
        return self.kind is not ActivationKind.RELU2


def compute_experts(
    engine: _native.ExpertEngine,
    layout: ExpertLayout,
    addresses: Tensor,
    activation: NativeActivation,
    hidden: Tensor,
    row_begin: Tensor,
    row_token: Tensor,
    out: Tensor,
) -> None:
    """Write the result of each routed token to `out` (num_routed, hidden_size), fp32.

    `hidden` is (n_tokens, hidden_size) fp32. The expert at `addresses[i]`, (n,) int64, computes the
    routed tokens `row_begin[i]` to `row_begin[i + 1]` - 1. Routed token j belongs to
    token `row_token[j]`. `row_begin` and `row_token` are int32. Raises `ModelError` if an index in
    either is out of range.
    """
    engine.wake()
    addresses, row_begin, row_token, hidden = _dense(addresses, row_begin, row_token, hidden)
    try:
        engine.run(
            native_layout(layout), layout.num_bytes, activation.kind, activation.alpha,
            activation.limit, activation.offset, addresses, row_begin, row_token, hidden, out,
        )  # fmt: skip
    except ValueError as error:
        raise ModelError(f"the routing of a layer is damaged: {error}") from error


def compute_experts_with(
    engine: _native.ExpertEngine,
    layout: ExpertLayout,
    addresses: Tensor,
    activate: Callable[[Tensor], Tensor],
    hidden: Tensor,
    row_begin: Tensor,
    row_token: Tensor,
    out: Tensor,
) -> None:
    """Compute what `compute_experts` does, with an activation in torch in place of a native one.

    `activate` maps [gate; up] of shape (num_routed, 2 * intermediate size), or (num_routed,
    intermediate size) if not gated, to (num_routed, intermediate size), fp32.
    """
    native, size = native_layout(layout), layout.intermediate_size
    per_column = 2 if layout.is_gated else 1
    num_routed = row_token.numel()
    up = torch.empty(num_routed, native.inner_rows * per_column, device="cpu")
    every = torch.arange(num_routed, dtype=torch.int32, device="cpu")
    addresses, row_begin, row_token, hidden = _dense(addresses, row_begin, row_token, hidden)
    project, num_bytes = engine.project, layout.num_bytes
    try:
        project(native, num_bytes, True, addresses, row_begin, row_token, hidden, up)
        # Blocks of 16 gate and 16 up values alternate.
        halves = up.view(num_routed, -1, per_column, ROWS_PER_BLOCK).transpose(1, 2)
        inner = torch.zeros(num_routed, native.inner_rows, device="cpu")
        flat = halves.reshape(num_routed, per_column, -1)[..., :size].reshape(num_routed, -1)
        inner[:, :size] = activate(flat)
        project(native, num_bytes, False, addresses, row_begin, every, inner, out)
    except ValueError as error:
        raise ModelError(f"the routing of a layer is damaged: {error}") from error


def _dense(*tensors: Tensor) -> list[Tensor]:
    """Return contiguous tensors, which the caller must keep alive while a native call runs."""
    return [tensor.contiguous() for tensor in tensors]


@functools.lru_cache(maxsize=64)
def native_layout(layout: ExpertLayout) -> _native.ExpertLayout:
    """Return a layout in the form that the kernels read."""
    native = _native.ExpertLayout()
    native.up = _native_projection(
        layout.format, layout.hidden_size, layout.up, layout.up_scales,
        layout.up_bias if layout.has_bias else None,
    )  # fmt: skip
    native.down = _native_projection(
        layout.down_format, layout.intermediate_size, layout.down, layout.down_scales,
        layout.down_bias if layout.has_bias else None,
    )  # fmt: skip
    native.hidden_size = layout.hidden_size
    native.inner_rows = layout.format.padded_rows(layout.intermediate_size)
    native.is_gated = layout.is_gated
    return native


def _native_projection(
    fmt: WeightFormat, cols: int, data: Section, scales: Section, bias: Section | None
) -> _native.ProjectionLayout:
    projection = _native.ProjectionLayout()
    projection.format, projection.group = fmt.encoding.number, fmt.group_size or 0
    projection.cols = fmt.padded_cols(cols)
    projection.data, projection.scales = data.offset, scales.offset
    projection.bias = -1 if bias is None else bias.offset
    return projection

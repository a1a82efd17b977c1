"""The operations between an expert's two projections, in registers: bias and activation."""

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language import constexpr, tensor

# The numbers of kernels.native.ActivationKind. PLAIN applies no activation: the model's own code
# does.
SWIGLU = constexpr(0)
GELU_TANH_GATE = constexpr(1)
RELU2 = constexpr(2)
LIMITED_SILU = constexpr(3)
SOFTCAPPED = constexpr(4)
PLAIN = constexpr(-1)


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The operations after an expert's first projection; kernels are compiled for each epilogue."""

    activation: int
    is_gated: bool
    alpha: float = 1.0
    limit: float = 0.0
    has_limit: bool = False
    up_offset: float = 0.0


@triton.jit
def gated(gate: tensor, up: tensor, epilogue: constexpr) -> tensor:
    """Return activation(gate, up); see `NativeActivation`."""
    if epilogue.activation == GELU_TANH_GATE:
        # 0.5 * (1 + tanh(z)) is sigmoid(2 z); the constants are those of GELU's tanh form.
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        inner = gate * _sigmoid(2 * z) * up
    elif epilogue.activation == LIMITED_SILU:
        up = tl.minimum(tl.maximum(up, -epilogue.limit), epilogue.limit)
        inner = tl.minimum(gate * _sigmoid(gate), epilogue.limit) * up
    elif epilogue.activation == SOFTCAPPED:
        inner = _softcapped(gate, epilogue.alpha) * _sigmoid(gate)
        inner *= _softcapped(up, epilogue.limit)
    else:
        if epilogue.has_limit:
            gate = tl.minimum(gate, epilogue.limit)
            up = tl.minimum(tl.maximum(up, -epilogue.limit), epilogue.limit)
        inner = gate * _sigmoid(epilogue.alpha * gate) * (up + epilogue.up_offset)
    return inner


@triton.jit
def _softcapped(x: tensor, cap: constexpr) -> tensor:
    return cap * (2 * _sigmoid(2 * x / cap) - 1)


@triton.jit
def _sigmoid(x: tensor) -> tensor:
    return 1 / (1 + tl.exp(-x))


@triton.jit
def relu2(x: tensor) -> tensor:
    """Return max(x, 0) squared."""
    positive = tl.maximum(x, 0.0)
    return positive * positive


@triton.jit
def load_bias(bias: tensor, block: tensor, offset: tensor, num_blocks: constexpr) -> tensor:
    """Return the bias of each output, fp32; 0 in blocks from `num_blocks` on."""
    return tl.load(bias + block * 16 + offset, mask=block < num_blocks, other=0.0)

"""Finds the native form of a model's activation by trying it, not by its name.

The activation is code that Tandem does not know. It is called on fixed random rows, and its result
is compared with those of the native candidates. Without a match, torch computes the activation.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tandem.kernels.native import ActivationKind, NativeActivation

# Larger than all limits of clamped activations (7 and 10 in today's models), so that clamping
# shows.
_PROBE_SCALE = 12.0
_PROBE_COLS = 64
_TOLERANCE = 1e-4

# Today's names for the parameters of a clamped SwiGLU.
_ALPHAS = ("alpha", "swiglu_alpha")
_LIMITS = ("limit", "swiglu_limit")
# Today's names for the soft limits of an activation's gate and value.
_SOFTCAPS = ("gate_softcap", "up_softcap")


def find_native_activation(
    activate: Callable[[Tensor], Tensor],
    *,
    is_gated: bool,
    is_interleaved: bool,
    parameters: object,
) -> NativeActivation | None:
    """Return the native form of a model's activation; None if no native activation matches.

    `activate` maps results of the first projection to the second projection's input. For gated
    experts, results are [gate; up] or, if `is_interleaved`, gate and up alternate. `parameters` is
    the object (the experts module) whose attributes may hold alpha and limit.
    """
    generator = torch.Generator().manual_seed(0)
    width = _PROBE_COLS * (1 + is_gated)
    rows = torch.randn(16, width, generator=generator, device="cpu") * _PROBE_SCALE
    inputs = interleave(rows) if is_gated and is_interleaved else rows
    try:
        with torch.no_grad():
            expected = activate(inputs)
    except RuntimeError:  # it needs another device, dtype or shape, so it is none of these
        return None
    for candidate in _candidates(is_gated, parameters):
        found = apply_activation(candidate, rows)
        if found.shape == expected.shape and torch.allclose(
            found, expected.float(), rtol=_TOLERANCE, atol=_TOLERANCE
        ):
            return candidate
    return None


def apply_activation(activation: NativeActivation, rows: Tensor) -> Tensor:
    """Return a native activation of `rows`, computed in torch as the reference for the kernels.

    Rows of a gated activation are [gate; up].
    """
    if activation.kind is ActivationKind.RELU2:
        return torch.relu(rows).square()
    gate, up = rows.chunk(2, dim=-1)
    if activation.kind is ActivationKind.GELU_TANH_GATE:
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    if activation.kind is ActivationKind.LIMITED_SILU:
        limit = activation.limit
        return torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    if activation.kind is ActivationKind.SOFTCAPPED:
        gate_cap, cap = activation.alpha, activation.limit
        capped = gate_cap * torch.tanh(gate / gate_cap)
        return capped * torch.sigmoid(gate) * (cap * torch.tanh(up / cap))
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.offset)


def _candidates(is_gated: bool, parameters: object) -> Iterator[NativeActivation]:
    if not is_gated:
        yield NativeActivation(ActivationKind.RELU2)
        return
    yield NativeActivation(ActivationKind.SWIGLU)
    yield NativeActivation(ActivationKind.GELU_TANH_GATE)
    for limit in _numbers(parameters, _LIMITS):
        yield NativeActivation(ActivationKind.SWIGLU, limit=limit)
        yield NativeActivation(ActivationKind.LIMITED_SILU, limit=limit)
        for alpha in _numbers(parameters, _ALPHAS):
            yield NativeActivation(ActivationKind.SWIGLU, alpha, limit, offset=1.0)
    own = getattr(parameters, "act_fn", None)
    of_gate, of_up = (_numbers(getattr(own, name, None), ("softcap",)) for name in _SOFTCAPS)
    for caps in zip(of_gate, of_up, strict=False):
        yield NativeActivation(ActivationKind.SOFTCAPPED, *caps)


def _numbers(parameters: object, names: tuple[str, ...]) -> list[float]:
    values = [getattr(parameters, name, None) for name in names]
    return [float(value) for value in values if isinstance(value, int | float)]


def interleave(rows: Tensor) -> Tensor:
    """Convert rows of [gate; up] to rows in which gate and up alternate."""
    gate, up = rows.chunk(2, dim=-1)
    return torch.stack([gate, up], dim=-1).flatten(-2)

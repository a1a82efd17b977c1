"""Recurrences and short convolutions that replace functions which modelling files call by name.

Transformers' models of linear attention and state spaces share a few functions, whose names,
arguments and meaning are the same (docs/decisions/0010-named-operations.md). If a call's state is
not one of Tandem's, the model's own function runs.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.decode.substitutions.substitution import Function
from tandem.kernels.recurrent import Convolution, Recurrence, RecurrenceForm
from tandem.kv_cache.base import NotInSlotsError, current_cache
from tandem.kv_cache.states import StateHandle

State = Tensor | StateHandle | None


def _convolve_prompt(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: object,
) -> Tensor | None:
    cache = current_cache()
    handle = None if cache is None else cache.requested_state
    if handle is None:
        return None
    return _convolve(handle, hidden_states, weight, bias, activation)


def _convolve_token(
    hidden_states: Tensor,
    conv_state: State,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | None:
    if not isinstance(conv_state, StateHandle):
        return None
    conv_state.cache.requested_state = conv_state
    return _convolve(conv_state, hidden_states, weight, bias, activation)


def _convolve(
    handle: StateHandle, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Return `x` convolved by channel, (b, channels, n_tokens); advance the state of `handle`."""
    if activation not in (None, "silu", "swish"):
        raise NotInSlotsError(f"a short convolution with the activation {activation}")
    batch, channels, num_tokens = x.shape
    result = handle.advance(
        "convolution",
        lambda: Convolution(weight, bias, has_silu=activation is not None),
        x.transpose(1, 2).reshape(batch * num_tokens, channels),
    )
    return result.view(batch, num_tokens, channels).transpose(1, 2)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: State = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, State] | None:
    """Compute the gated delta rule; return its result and the state.

    None if the state is not one of Tandem's, so that the model's own code must run. `g` has a decay
    for each head or, as in Kimi's attention, for each value of a key.
    """
    if not isinstance(initial_state, StateHandle) or cu_seqlens is not None:
        return None
    form = RecurrenceForm(
        num_heads=value.shape[2],
        num_key_heads=key.shape[2],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        decay="head" if g.dim() == 3 else "key",
        is_delta=True,
        is_normalised=use_qk_l2norm_in_kernel,
        scale=key.shape[3] ** -0.5,
    )
    out = initial_state.advance(
        "recurrence",
        lambda: Recurrence(form),
        *(x.flatten(0, 1) for x in (value, query, key)),
        g.float().flatten(0, 1).contiguous(),
        beta.flatten(0, 1).contiguous(),
    )
    return out.view(value.shape), initial_state


def _scan_prompt(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: State = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    z: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, State] | None:
    """Compute Mamba-2 over a prompt, (b, n_tokens, heads, head_dim); return the result and state.

    None if the model's own code must run, as in all functions here.
    """
    if not isinstance(initial_states, StateHandle) or z is not None:
        return None
    rate = _time_steps(dt, dt_bias, has_softplus=dt_softplus, limit=dt_limit)
    x, steps, key, query = (part.flatten(0, 1) for part in (hidden_states, rate, B, C))
    out = _scan(initial_states, x, steps, key, query, A, D)
    return out.view(hidden_states.shape), initial_states


def _scan_token(
    state: State,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **kwargs: object,
) -> Tensor | None:
    """Compute one token of Mamba, (b, channels), or of Mamba-2, (b, heads, head_dim).

    Mamba-2's arguments, except B and C, are expanded over the values of a head.
    """
    if not isinstance(state, StateHandle):
        return None
    if hidden_states.dim() == 2:
        rate = _time_steps(dt, dt_bias, has_softplus=dt_softplus)
        return _selective_scan(state, hidden_states, rate, A, B, C, D, z)
    if z is not None:
        return None
    bias = None if dt_bias is None else dt_bias[:, 0]
    rate = _time_steps(dt[..., 0], bias, has_softplus=dt_softplus)
    return _scan(state, hidden_states, rate, B, C, A[:, 0, 0], D)


def _scan(
    handle: StateHandle,
    x: Tensor,
    rate: Tensor,
    key: Tensor,
    query: Tensor,
    a: Tensor,
    skip: Tensor | None,
) -> Tensor:
    """Advance the state S to e^(a rate) S + outer(B, rate x); return C S + skip x.

    `x` is (n_tokens, heads, head_dim); B is `key`, and C is `query`.
    """
    num_heads, head_dim = x.shape[1:]
    form = RecurrenceForm(num_heads, key.shape[1], key.shape[2], head_dim, "head")
    skips = None if skip is None else skip.view(num_heads, -1).expand(num_heads, head_dim)
    decay = (rate.float() * a.float()).contiguous()
    return handle.advance(
        "recurrence",
        lambda: Recurrence(form, skip=skips),
        x, query, key, decay, rate.contiguous(),
    )  # fmt: skip


def _selective_scan_prompt(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: object,
) -> tuple[Tensor, State] | None:
    """Compute Mamba over a prompt, (b, channels, n_tokens); return the result and the state.

    The state is the one that the convolution before this call used.
    """
    cache = current_cache()
    handle = None if cache is None else cache.requested_state
    if handle is None or not return_last_state:
        return None
    x, steps, b, c = (part.transpose(1, 2).flatten(0, 1) for part in (hidden_states, dt, B, C))
    gate = None if z is None else z.transpose(1, 2).flatten(0, 1)
    rate = _time_steps(steps, delta_bias, has_softplus=delta_softplus)
    out = _selective_scan(handle, x, rate, A, b, c, D, gate)
    batch, channels, num_tokens = hidden_states.shape
    return out.view(batch, num_tokens, channels).transpose(1, 2), handle


def _selective_scan(
    handle: StateHandle,
    x: Tensor,
    rate: Tensor,
    a: Tensor,
    key: Tensor,
    query: Tensor,
    skip: Tensor | None,
    gate: Tensor | None,
) -> Tensor:
    """Advance the state S to e^(rate A) S + outer(rate x, B); return (C S + skip x) silu(gate).

    `x` is (n_tokens, channels); B is `key`, and C is `query`.
    """
    channels, key_dim = a.shape
    form = RecurrenceForm(1, 1, key_dim, channels, "pair")
    wide, rate = x.float(), rate.float()
    out = handle.advance(
        "recurrence",
        lambda: Recurrence(form, factor=a.float()),
        (wide * rate)[:, None], query.float()[:, None], key.float()[:, None], rate.contiguous(),
    )[:, 0]  # fmt: skip
    if skip is not None:
        out = out + wide * skip.float()
    if gate is not None:
        out = out * F.silu(gate.float())
    return out.to(x.dtype)


def _time_steps(
    dt: Tensor,
    bias: Tensor | None,
    *,
    has_softplus: bool,
    limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    if has_softplus:
        dt = F.softplus(dt)
    low, high = limit
    return dt if low <= 0 and high == float("inf") else torch.clamp(dt, min=low, max=high)


RECURRENCES: Mapping[str, Function] = {
    "causal_conv1d_fn": _convolve_prompt,
    "causal_conv1d_update": _convolve_token,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _scan_prompt,
    "mamba2_selective_state_update": _scan_token,
    "mamba_selective_scan": _selective_scan_prompt,
    "mamba_selective_state_update": _scan_token,
}

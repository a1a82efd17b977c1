"""Hyper-connections (DeepSeek-V4, GLM-5-Next, HunYuan V4): residual streams in and out of a layer.

A module mixes the streams into a layer's input. A line of the layer's code then updates the streams
(the way back): weights times the layer's output, plus a matrix of weights times the streams.
Objects that record operations stand for these weights. If the recorded operations have the known
form, they become one native operation; in any other use the objects act as the plain weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.decode.substitutions.substitution import Substitution, has
from tandem.foreign_types import ModelPart
from tandem.kernels.dense import VALUE_DTYPES, CpuThreads
from tandem.kernels.hyper_connections import (
    MOST_STREAMS,
    HyperConnection,
    StreamKernels,
    mix_in,
    mix_out,
)
from tandem.kernels.opaque_calls import MIX_IN, MIX_OUT, mapped, opaque
from tandem.kv_cache.base import current_cache
from tandem.kv_cache.cpu import KvCache
from tandem.kv_cache.cuda.cache import StaticKvCache

_has_names = has("fn", "base", "scale", "hc_mult", "hc_eps", "input_norm")
_is_head = has("hc_fn", "hc_base", "hc_scale", "hc_mult", "eps", "input_norm")


def _connection_of(module: ModelPart) -> HyperConnection | None:
    """Return a module's parameters for mixing streams; None for a module of unknown form."""
    n, eps, norm_eps = module.hc_mult, module.hc_eps, module.input_norm.eps
    if len(module.fn) == (2 + n) * n and hasattr(module, "hc_sinkhorn_iters"):
        return HyperConnection(norm_eps, eps, 2.0, 0.0, module.hc_sinkhorn_iters)
    if len(module.fn) == 2 * n and hasattr(module, "hc_post_magnitude"):
        return HyperConnection(norm_eps, eps, module.hc_post_magnitude, eps)
    return None


def _is_connection(module: ModelPart) -> bool:
    return _has_names(module) and _connection_of(module) is not None


def _mix(self: ModelPart, hidden_streams: Tensor) -> tuple[object, ...] | None:
    """Return the weights for the way back, and the layer's input.

    The weights are those of the layer's output and, in modules with Sinkhorn rounds, the matrix
    that mixes the streams. Returns None if the model's own code must run.
    """
    kernels, connection = _kernels_for(hidden_streams, self.fn), _connection_of(self)
    if kernels is None or connection is None:
        return None
    matrices = self.fn, self.base.float(), self.scale.float()
    out, weights = kernels.mix_in(connection, hidden_streams, *matrices)
    n = self.hc_mult
    of_output = weights[..., :n]
    if not connection.num_rounds:
        return of_output, out
    back = _WayBack(kernels, weights, hidden_streams)
    mixture = weights[..., n:].unflatten(-1, (n, n))
    return _Weights(of_output, back), _Weights(mixture, back), out


def _collapse(self: ModelPart, x: Tensor) -> Tensor | None:
    """Return the output head's input, a weighted sum of the streams.

    None if the model's own code must run.
    """
    kernels = _kernels_for(x, self.hc_fn)
    if kernels is None:
        return None
    connection = HyperConnection(self.input_norm.eps, self.eps)
    out, _ = kernels.mix_in(connection, x, self.hc_fn, self.hc_base.float(), self.hc_scale.float())
    return out


def _kernels_for(streams: Tensor, matrix: Tensor) -> StreamKernels | None:
    """Return the kernels that mix streams; None: the model's own code must run.

    None in prompts on a GPU, because the kernels would read the matrix again for every token.
    """
    cache = current_cache()
    are_known = all(x.dtype in VALUE_DTYPES for x in (streams, matrix))
    if streams.shape[-2] > MOST_STREAMS:
        return None
    if isinstance(cache, StaticKvCache):
        return cache.stream_kernels if cache.is_decoding else None
    on_cpu = not streams.is_cuda and not matrix.is_cuda
    return (
        _CpuStreams(cache.threads) if isinstance(cache, KvCache) and are_known and on_cpu else None
    )


@dataclass(frozen=True, slots=True)
class _CpuStreams:
    """The `StreamKernels` of the CPU: native operations, as calls that can be recorded."""

    threads: CpuThreads

    def mix_in(self, *args: Any) -> tuple[Tensor, Tensor]:
        """See `StreamKernels`."""
        return opaque(MIX_IN, mix_in, self.threads, *args)

    def mix_out(self, *args: Any) -> Tensor:
        """See `StreamKernels`."""
        return opaque(MIX_OUT, mix_out, self.threads, *args)


@dataclass(frozen=True, slots=True)
class _WayBack:
    """The operands of the update of residual streams by a layer's output."""

    kernels: StreamKernels
    weights: Tensor
    """The weights that `mix_in` returned."""
    streams: Tensor


@dataclass(frozen=True, slots=True)
class _Weights:
    """Stands for weights of the way back while a layer's code uses them."""

    start: Tensor
    """The weights that `mix_in` returned, unchanged."""
    back: _WayBack
    steps: tuple[tuple[str, tuple[object, ...]], ...] = ()
    """The operations on the weights so far: names of tensor methods, with arguments."""

    def _then(self, name: str, *args: object, **kwargs: object) -> object:
        if kwargs:
            return getattr(self.tensor, name)(*args, **kwargs)
        return replace(self, steps=(*self.steps, (name, args)))

    @property
    def tensor(self) -> Tensor:
        """The weights after the recorded steps."""
        done = self.start
        for name, args in self.steps:
            done = getattr(done, name)(*args)
        return done

    def __mul__(self, other: object) -> object:
        """Return weights that also record the product with a layer's output; compute nothing."""
        return self._then("__mul__", other)

    def __add__(self, other: object) -> Tensor:
        """Return the sum of the weighted output and the mixed streams.

        One native operation computes the sum if the recorded steps have the known form; otherwise
        torch computes it.
        """
        if isinstance(other, _Weights) and other.back is self.back:
            y = self._matched_output(other)
            if y is not None:
                return self.back.kernels.mix_out(y, self.back.weights, self.back.streams)
        result: Tensor = self.tensor + _tensor_of(other)
        return result

    def _matched_output(self, mixed: "_Weights") -> Tensor | None:
        """Return the layer's output if the native operation computes the recorded steps, else None.

        `mixed` has the recorded steps of the sum's other operand, the mixed streams.
        """
        streams, dtype = self.back.streams, self.back.streams.dtype
        match self.steps, mixed.steps:
            case (
                (("to", (first,)), ("unsqueeze", (-1,)), ("__mul__", (Tensor() as y,))),
                (("to", (second,)), ("transpose", (-1, -2)), ("matmul", (Tensor() as meets,))),
            ) if first == second == y.dtype == dtype and meets is streams:
                shape = (*streams.shape[:-2], 1, streams.shape[-1])
                return y.squeeze(-2) if y.shape == shape else None
        return None

    def __getattr__(self, name: str) -> Any:
        if name in ("to", "unsqueeze", "transpose"):
            return partial(self._then, name)
        return getattr(self.tensor, name)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Record a product with the streams; pass the plain weights to other torch functions."""
        if function is torch.matmul and isinstance(args[0], cls) and not kwargs:
            return args[0]._then("matmul", *args[1:])
        args, kwargs = mapped(_tensor_of, (args, dict(kwargs or {})))
        return function(*args, **kwargs)


def _tensor_of(value: object) -> Any:
    return value.tensor if isinstance(value, _Weights) else value


CONNECTION = Substitution(_is_connection, _mix)
HEAD = Substitution(_is_head, _collapse)

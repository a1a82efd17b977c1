"""One expert's arithmetic in plain torch: slow, but the definition of the correct result."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The tensors of one expert, in the checkpoint's orientation.

    `up` is (2 * intermediate_size, hidden_size) for gated experts (gate and up together, in the
    order that the activation expects) and (intermediate_size, hidden_size) for un-gated ones;
    `down` is (hidden_size, intermediate_size). Both are transposed if `is_transposed`.
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    is_transposed: bool = False


def expert_ffn(
    rows: Tensor, weights: ExpertWeights, activate: Callable[[Tensor], Tensor]
) -> Tensor:
    """Apply one expert to its tokens: (n_tokens, hidden_size) -> (n_tokens, hidden_size).

    `activate` maps the first projection's rows to (n_tokens, intermediate_size). Arithmetic is in
    the dtype of `rows`; weights of another dtype are converted for the call.
    """
    inner = activate(_linear(rows, weights.up, weights.up_bias, weights.is_transposed))
    return _linear(inner, weights.down, weights.down_bias, weights.is_transposed)


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:
    weight = weight.to(rows.dtype)
    bias = None if bias is None else bias.to(rows.dtype)
    return torch.nn.functional.linear(rows, weight.T if is_transposed else weight, bias)

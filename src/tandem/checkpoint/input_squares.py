"""Mean squares of matrices' inputs, smoothed where few tokens were seen."""

from typing import NamedTuple

import torch
from torch import Tensor

# After so many tokens an expert's own squares and the prior have equal weight.
_PRIOR_TOKENS = 32.0
# Share of the mean. An input that was always 0 in this text may be nonzero in another.
_LEAST = 1e-2


class InputSquares(NamedTuple):
    """The mean squares of the inputs of one matrix, or of the same matrix of each expert."""

    mean_square: Tensor  # (num_matrices, cols) fp32
    tokens: Tensor  # (num_matrices,) tokens that reached each; empty if they were not counted


def importance_of(found: InputSquares, *, are_inner: bool) -> Tensor:
    """Return the importance (num_matrices, cols), with mean 1 also for matrices without tokens.

    Importance is the root of the mean square: a few tokens dominate the mean square itself, and
    answers do not get worse in proportion to it (docs/quality.md has the numbers). Collected mean
    squares are averaged with a prior, weighted by their number of tokens. The experts of a layer
    read the same input channels, so the prior is their mean over the layer. If `are_inner`, the
    inputs are each expert's own inner channels, and the prior is uniform over these channels.
    """
    squares, tokens = found.mean_square.float(), found.tokens.float()[:, None]
    squares = squares.nan_to_num(0.0, 0.0, 0.0).clamp(min=0.0)
    if are_inner:
        prior = squares.mean(-1, keepdim=True).expand(squares.shape)
    else:
        prior = (squares * tokens).sum(0, keepdim=True) / tokens.sum().clamp(min=1.0)
    mixed = (tokens * squares + _PRIOR_TOKENS * prior) / (tokens + _PRIOR_TOKENS)
    roots = mixed.sqrt()
    mean = roots.mean(-1, keepdim=True)
    return torch.where(mean > 0, roots / mean, 1.0).clamp(min=_LEAST)

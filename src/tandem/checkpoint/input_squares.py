"""Mean squares of matrices' inputs, smoothed where few tokens were seen."""

from typing import NamedTuple

import torch
from torch import Tensor

# An expert that so many tokens reached follows them and what is known before by halves.
_PRIOR_TOKENS = 32.0
# Of the mean: an input that was always 0 in a text may be another in the next.
_LEAST = 1e-4


class InputSquares(NamedTuple):
    """The mean squares collected for one matrix, or for each expert's."""

    mean_square: Tensor  # (num_matrices, cols) fp32
    tokens: Tensor  # (num_matrices,) that reached each; none: not counted


def with_prior(found: InputSquares, *, are_inner: bool) -> Tensor:
    """Return the importance (num_matrices, cols) with a mean of 1, smoothed by a prior.

    The more tokens a matrix saw, the more its own mean squares count. For the inputs of experts the
    prior is the mean of the whole layer, as they share their inputs. For inner channels
    (`are_inner`), which belong to one expert each, the prior counts all alike.
    """
    squares, tokens = found.mean_square.float(), found.tokens.float()[:, None]
    squares = squares.nan_to_num(0.0, 0.0, 0.0).clamp(min=0.0)
    if are_inner:
        prior = squares.mean(-1, keepdim=True).expand(squares.shape)
    else:
        prior = (squares * tokens).sum(0, keepdim=True) / tokens.sum().clamp(min=1.0)
    mixed = (tokens * squares + _PRIOR_TOKENS * prior) / (tokens + _PRIOR_TOKENS)
    mean = mixed.mean(-1, keepdim=True)
    return torch.where(mean > 0, mixed / mean, 1.0).clamp(min=_LEAST)
